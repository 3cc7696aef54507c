/* The boot program of a sandbox: shared types and the rooms' faces.
 *
 * main.c      the order of steps, and what happens when one fails
 * cmdline.c   kernel command line -> struct boot (pure)
 * modules.c   loads the kernel modules of the initramfs
 * disks.c     finds disks by their virtio serial
 * mounts.c    layers, copy-on-write disk, overlay, the move into the new root
 */
#ifndef COCOON_INIT_H
#define COCOON_INIT_H

#include <stddef.h>

#define MAX_LAYERS 16
#define MAX_SERIAL 20 /* VIRTIO_BLK_ID_BYTES */
#define MAX_HOSTNAME 64 /* __NEW_UTS_LEN */
#define MAX_PATH_LEN 256
#define MAX_REASON 256
#define DEFAULT_TIMEOUT_S 10
#define LONGEST_TIMEOUT_S 86400

struct boot {
	char layers[MAX_LAYERS][MAX_SERIAL + 1]; /* bottom first */
	size_t layer_count;
	char cow[MAX_SERIAL + 1];
	unsigned timeout_s;
	char hostname[MAX_HOSTNAME + 1]; /* empty: leave the kernel's */
	char init[MAX_PATH_LEN];
	int debug;
	int trace;
};

/* Returns 0, or -1 with one sentence in `reason`. `text` need not end in a
 * newline; unknown keys are ignored, the last of a repeated key counts. */
int cmdline_parse(const char *text, struct boot *boot, char reason[MAX_REASON]);

/* Loads /modules/<name> for each line of /modules/order. A module that does not
 * load is said on the console and passed over: what needed it will say more. */
void modules_load(void);

/* Waits until the disk with `serial` is there; puts its device path in `path`.
 * Returns 0, or -1 when `deadline_ns` (CLOCK_MONOTONIC) has passed. */
int disk_find(const char *serial, long long deadline_ns, char path[MAX_PATH_LEN]);

/* Mounts /proc, /sys and /dev of the initramfs. */
int mounts_early(char reason[MAX_REASON]);

/* Builds the root in /root from the layer devices (bottom first) and the cow device. */
int mounts_root(char layers[][MAX_PATH_LEN], size_t count, const char *cow, char reason[MAX_REASON]);

/* Makes /root the root of everything and frees the initramfs. */
int mounts_switch(char reason[MAX_REASON]);

long long now_ns(void);

/* One line on the console, prefixed so that it can be found. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
