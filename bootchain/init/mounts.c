#include "init.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define COW "/cow"
#define LAYERS "/layers"
#define ROOT "/root"

static int make_dir(const char *path)
{
	return mkdir(path, 0755) < 0 && errno != EEXIST ? -1 : 0;
}

static int try_mount(const char *source, const char *target, const char *type, unsigned long flags,
		     const char *data, char reason[MAX_REASON])
{
	if (make_dir(target) == 0 && mount(source, target, type, flags, data) == 0)
		return 0;
	snprintf(reason, MAX_REASON, "cannot mount %.64s (%.64s) on %.64s: %s", source, type, target,
		 strerror(errno));
	return -1;
}

int mounts_early(char reason[MAX_REASON])
{
	const unsigned long plain = MS_NOSUID | MS_NODEV | MS_NOEXEC;

	if (try_mount("proc", "/proc", "proc", plain, "", reason) < 0 ||
	    try_mount("sysfs", "/sys", "sysfs", plain, "", reason) < 0)
		return -1;
	return try_mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755", reason);
}

/* An image without a machine-id, or with one left in it, must not give every
 * machine the same: an empty file makes the guest's init take a transient one. */
static int blank_machine_id(char reason[MAX_REASON])
{
	static const char path[] = ROOT "/etc/machine-id";
	struct stat facts;
	int file;

	/* An empty one stays in its layer: opening it for writing would copy it up. */
	if (lstat(path, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size == 0)
		return 0;
	if (make_dir(ROOT "/etc") == 0) {
		file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0444);
		if (file >= 0) {
			close(file);
			return 0;
		}
	}
	snprintf(reason, MAX_REASON, "cannot blank /etc/machine-id: %s", strerror(errno));
	return -1;
}

int mounts_root(char layers[][MAX_PATH_LEN], size_t count, const char *cow, char reason[MAX_REASON])
{
	char data[4096] = "lowerdir=", target[MAX_PATH_LEN];
	size_t used = strlen(data);

	if (make_dir(LAYERS) < 0 || make_dir(ROOT) < 0) {
		snprintf(reason, MAX_REASON, "cannot make mount points: %s", strerror(errno));
		return -1;
	}
	/* overlayfs wants the top layer first. */
	for (size_t i = count; i-- > 0;) {
		snprintf(target, sizeof target, LAYERS "/%zu", i);
		if (try_mount(layers[i], target, "erofs", MS_RDONLY, "", reason) < 0)
			return -1;
		used += (size_t)snprintf(data + used, sizeof data - used, "%s%s", used > 9 ? ":" : "", target);
	}
	if (try_mount(cow, COW, "ext4", MS_NOATIME, "", reason) < 0)
		return -1;
	if (make_dir(COW "/upper") < 0 || make_dir(COW "/work") < 0) {
		snprintf(reason, MAX_REASON, "cannot prepare the cow disk: %s", strerror(errno));
		return -1;
	}
	snprintf(data + used, sizeof data - used,
		 ",upperdir=" COW "/upper,workdir=" COW "/work,index=on,redirect_dir=on,metacopy=on,xino=on");
	if (try_mount("overlay", ROOT, "overlay", MS_NOATIME, data, reason) < 0)
		return -1;
	return blank_machine_id(reason);
}

/* Frees the memory of the initramfs. Only its own device is touched. */
static void remove_tree(int parent, const char *name, dev_t device)
{
	struct stat facts;
	struct dirent *entry;
	DIR *stream;
	int folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	if (folder >= 0 && fstat(folder, &facts) == 0 && facts.st_dev == device && (stream = fdopendir(folder))) {
		while ((entry = readdir(stream)))
			if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
				remove_tree(dirfd(stream), entry->d_name, device);
		closedir(stream);
		unlinkat(parent, name, AT_REMOVEDIR);
		return;
	}
	if (folder >= 0)
		close(folder);
	else
		unlinkat(parent, name, 0);
}

int mounts_switch(char reason[MAX_REASON])
{
	static const char *const moved[] = {"/proc", "/sys", "/dev"};
	static const char *const own[] = {"init", "modules"};
	char target[MAX_PATH_LEN];
	struct stat facts;
	int old;

	for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
		snprintf(target, sizeof target, ROOT "%s", moved[i]);
		if (make_dir(target) < 0 || mount(moved[i], target, NULL, MS_MOVE, NULL) < 0) {
			snprintf(reason, MAX_REASON, "cannot move %s into the new root: %s", moved[i], strerror(errno));
			return -1;
		}
	}
	old = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (old >= 0 && fstat(old, &facts) == 0)
		for (size_t i = 0; i < sizeof own / sizeof *own; i++)
			remove_tree(old, own[i], facts.st_dev);
	if (old >= 0)
		close(old);
	if (chdir(ROOT) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0) {
		snprintf(reason, MAX_REASON, "cannot switch to the new root: %s", strerror(errno));
		return -1;
	}
	return 0;
}
