#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CMDLINE_ROOM 4097 /* COMMAND_LINE_SIZE of x86 is 2048 */

long long now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void say(const char *format, ...)
{
	/* One write, so that the kernel's own lines do not fall into it. */
	char line[512];
	int used = snprintf(line, sizeof line, "cocoon-init: ");
	va_list arguments;

	va_start(arguments, format);
	used += vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
	va_end(arguments);
	if (used > (int)sizeof line - 2)
		used = sizeof line - 2;
	line[used++] = '\n';
	if (write(STDERR_FILENO, line, (size_t)used) < 0)
		return;
}

static void open_console(void)
{
	/* The driver of a virtio console is a module: until it is loaded, only the
	 * kernel's log keeps what is said. */
	int console = open("/dev/console", O_RDWR | O_NOCTTY);

	if (console < 0)
		console = open("/dev/kmsg", O_WRONLY);
	if (console < 0)
		return;
	for (int stream = 0; stream < 3; stream++)
		dup2(console, stream);
	if (console > 2)
		close(console);
}

static void give_up(const struct boot *boot, const char *reason)
{
	say("fatal: %s", reason);
	if (boot->debug) {
		execl("/bin/sh", "sh", (char *)NULL);
		say("sandbox.debug: no /bin/sh here; waiting for ever, attach to the machine");
		for (;;)
			pause();
	}
	say("powering off");
	sync();
	reboot(RB_POWER_OFF);
	for (;;)
		pause();
}

static void trace(const struct boot *boot, const char *phase)
{
	static long long last;
	long long now = now_ns();

	if (boot->trace)
		say("trace: %s +%lld us", phase, (now - last) / 1000);
	last = now;
}

static int read_cmdline(char text[CMDLINE_ROOM])
{
	int file = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t length = file < 0 ? -1 : read(file, text, CMDLINE_ROOM - 1);

	if (file >= 0)
		close(file);
	if (length < 0)
		return -1;
	text[length] = '\0';
	return 0;
}

int main(void)
{
	static struct boot boot;
	static char devices[MAX_LAYERS][MAX_PATH_LEN], cow[MAX_PATH_LEN];
	char text[CMDLINE_ROOM], reason[MAX_REASON];
	long long deadline;
	int status;

	umask(022);
	if (mounts_early(reason) < 0)
		give_up(&boot, reason);
	open_console();
	say("start at %.3fs", (double)now_ns() / 1e9);
	status = read_cmdline(text);
	if (status < 0)
		snprintf(reason, sizeof reason, "cannot read /proc/cmdline");
	else
		status = cmdline_parse(text, &boot, reason);
	trace(&boot, "cmdline");
	modules_load();
	open_console();
	/* Only now: on a virtio console nothing said before would have been seen. */
	if (status < 0)
		give_up(&boot, reason);
	trace(&boot, "modules");
	deadline = now_ns() + boot.timeout_s * 1000000000LL;
	for (size_t i = 0; i <= boot.layer_count; i++) {
		const char *serial = i < boot.layer_count ? boot.layers[i] : boot.cow;
		if (disk_find(serial, deadline, i < boot.layer_count ? devices[i] : cow) < 0) {
			snprintf(reason, sizeof reason,
				 "no disk with serial \"%s\" within %u s: attach it, or correct %s", serial,
				 boot.timeout_s, i < boot.layer_count ? "cocoon.layers" : "cocoon.cow");
			give_up(&boot, reason);
		}
	}
	trace(&boot, "disks");
	if (mounts_root(devices, boot.layer_count, cow, reason) < 0)
		give_up(&boot, reason);
	trace(&boot, "mounts");
	if (boot.hostname[0] && sethostname(boot.hostname, strlen(boot.hostname)) < 0)
		say("cannot set the hostname: %s", strerror(errno));
	if (mounts_switch(reason) < 0)
		give_up(&boot, reason);
	trace(&boot, "switch");
	say("rootfs ready at %.3fs", (double)now_ns() / 1e9);
	execl(boot.init, boot.init, (char *)NULL);
	snprintf(reason, sizeof reason, "cannot run %.200s: %s", boot.init, strerror(errno));
	give_up(&boot, reason);
}
