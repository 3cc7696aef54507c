#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void load(const char *name)
{
	char path[MAX_PATH_LEN + 16];
	int file;

	snprintf(path, sizeof path, "/modules/%s", name);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0 || (syscall(SYS_finit_module, file, "", 0) < 0 && errno != EEXIST))
		say("module %s does not load: %s", name, strerror(errno));
	if (file >= 0)
		close(file);
}

void modules_load(void)
{
	char name[MAX_PATH_LEN];
	FILE *order = fopen("/modules/order", "re");

	if (!order) {
		say("no /modules/order in the initramfs: build it again");
		return;
	}
	while (fgets(name, sizeof name, order)) {
		name[strcspn(name, "\n")] = '\0';
		if (name[0])
			load(name);
	}
	fclose(order);
}
