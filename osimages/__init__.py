"""Guest OS images: from `<name>/image.toml` to a store of EROFS layers addressed by digest.

Owns the content of the guest's root file system below the copy-on-write disk. Kernel and initramfs are
`bootchain`'s; who attaches the layers to a VM is the node's engine, which reads the store and imports
nothing from here.

Modules, in the order of the data: `spec` (declaration) → `stamp` (has an input changed?) → `debian` and
`guest` (the trees of the two layers) → `erofs` (tree → layer) → `manifest` and `store` (layers → image),
wired by `builder`.
"""
