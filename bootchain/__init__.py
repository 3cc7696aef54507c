"""The boot chain: a stock kernel and one static program that makes the root.

`kernel` takes Debian's cloud kernel apart, `init` is the boot program, `initramfs`
packs them, `build` puts the artifacts in place. Used by `make images`; the node
agent sees only what it leaves in `build/boot`.
"""
