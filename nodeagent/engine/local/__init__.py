"""Engine `local`: guestd in namespaces over an image's files. No security boundary; tests only."""
