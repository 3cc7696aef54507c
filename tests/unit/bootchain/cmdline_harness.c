/* Reads one kernel command line from stdin and prints what /init makes of it. */
#include "init.h"

#include <stdio.h>

int main(void)
{
	static char text[1 << 20];
	static struct boot boot;
	char reason[MAX_REASON];

	text[fread(text, 1, sizeof text - 1, stdin)] = '\0';
	if (cmdline_parse(text, &boot, reason) < 0) {
		printf("fault\n%s\n%d\n", reason, boot.debug);
		return 0;
	}
	printf("boot\n");
	for (size_t i = 0; i < boot.layer_count; i++)
		printf("%s%s", i ? "," : "", boot.layers[i]);
	printf("\n%s\n%u\n%s\n%s\n%d\n%d\n", boot.cow, boot.timeout_s, boot.hostname, boot.init, boot.debug, boot.trace);
	return 0;
}
