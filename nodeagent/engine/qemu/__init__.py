"""Engine `qemu`: microVMs on KVM where it works, else under software emulation."""
