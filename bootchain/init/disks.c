#include "init.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POLL_NS (2 * 1000 * 1000)

static int has_serial(const char *device, const char *serial)
{
	/* One byte more than a serial can have, so that a longer one does not match. */
	char path[MAX_PATH_LEN], found[MAX_SERIAL + 2];
	ssize_t length;
	int file;

	snprintf(path, sizeof path, "/sys/block/%.64s/serial", device);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return 0;
	length = read(file, found, sizeof found);
	close(file);
	if (length < 0)
		return 0;
	if (length && found[length - 1] == '\n')
		length--;
	return strlen(serial) == (size_t)length && memcmp(serial, found, (size_t)length) == 0;
}

static int look(const char *serial, char path[MAX_PATH_LEN])
{
	DIR *blocks = opendir("/sys/block");
	struct dirent *entry;
	int found = 0;

	if (!blocks)
		return 0;
	while (!found && (entry = readdir(blocks)))
		if (strncmp(entry->d_name, "vd", 2) == 0 && has_serial(entry->d_name, serial)) {
			snprintf(path, MAX_PATH_LEN, "/dev/%.64s", entry->d_name);
			found = access(path, F_OK) == 0;
		}
	closedir(blocks);
	return found;
}

int disk_find(const char *serial, long long deadline_ns, char path[MAX_PATH_LEN])
{
	const struct timespec pause = {.tv_nsec = POLL_NS};

	while (!look(serial, path)) {
		if (now_ns() >= deadline_ns)
			return -1;
		nanosleep(&pause, NULL);
	}
	return 0;
}
