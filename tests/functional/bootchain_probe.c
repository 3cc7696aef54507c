/* The /sbin/init of the boot tests: prints what kind of root it was given, then powers off. */
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <stdio.h>
#include <string.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static void print_file(const char *path)
{
	char text[200] = "-";
	int file = open(path, O_RDONLY);
	ssize_t length = file < 0 ? 1 : read(file, text, sizeof text - 1);

	text[length < 0 ? 0 : length] = '\0';
	close(file);
	printf("probe: file %s=%s\n", path, text);
}

static void write_file(const char *path, const char *text)
{
	int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);

	if (file < 0 || write(file, text, strlen(text)) < 0)
		printf("probe: cannot write %s: %s\n", path, strerror(errno));
	close(file);
}

/* A listener and a caller inside one kernel: the modules are there and joined. */
static const char *vsock_loopback(void)
{
	struct sockaddr_vm here = {.svm_family = AF_VSOCK, .svm_port = 2048, .svm_cid = VMADDR_CID_LOCAL};
	int listener = socket(AF_VSOCK, SOCK_STREAM, 0), caller = socket(AF_VSOCK, SOCK_STREAM, 0);

	if (listener < 0 || bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, 1) < 0 ||
	    connect(caller, (struct sockaddr *)&here, sizeof here) < 0)
		return strerror(errno);
	return "works";
}

static void print_mounts(void)
{
	char line[1024];
	FILE *mounts = fopen("/proc/self/mounts", "r");

	while (mounts && fgets(line, sizeof line, mounts))
		printf("probe: mount %s", line);
}

int main(int argc, char **argv)
{
	(void)argc;
	char hostname[100] = "";
	struct stat facts;

	setvbuf(stdout, NULL, _IOLBF, 0);
	gethostname(hostname, sizeof hostname - 1);
	printf("probe: pid=%d argv0=%s\n", getpid(), argv[0]);
	printf("probe: hostname=%s\n", hostname);
	print_file("/only-bottom");
	print_file("/only-top");
	print_file("/both");
	print_file("/note");
	printf("probe: machine-id size=%lld\n",
	       lstat("/etc/machine-id", &facts) < 0 ? -1LL : (long long)facts.st_size);
	write_file("/link-a", "changed");
	print_file("/link-b");
	printf("probe: rename=%s\n", rename("/folder", "/folder-renamed") < 0 ? strerror(errno) : "works");
	print_file("/folder-renamed/file");
	printf("probe: vsock=%s\n", vsock_loopback());
	print_mounts();
	write_file("/note", "from an earlier boot");
	printf("probe: done\n");
	sync();
	reboot(RB_POWER_OFF);
	return 1;
}
