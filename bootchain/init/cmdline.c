#include "init.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(char reason[MAX_REASON], const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(reason, MAX_REASON, format, arguments);
	va_end(arguments);
	return -1;
}

static int set_serial(char into[MAX_SERIAL + 1], const char *value, size_t length)
{
	if (length == 0 || length > MAX_SERIAL)
		return -1;
	memcpy(into, value, length);
	into[length] = '\0';
	return 0;
}

static int parse_layers(struct boot *boot, const char *value, size_t length, char reason[MAX_REASON])
{
	const char *end = value + length;
	boot->layer_count = 0;
	while (value <= end) {
		const char *comma = memchr(value, ',', (size_t)(end - value));
		size_t part = (size_t)((comma ? comma : end) - value);
		if (boot->layer_count == MAX_LAYERS)
			return fail(reason, "cocoon.layers: more than %d layers", MAX_LAYERS);
		if (set_serial(boot->layers[boot->layer_count], value, part) < 0)
			return fail(reason, "cocoon.layers: each serial has 1 to %d characters", MAX_SERIAL);
		boot->layer_count++;
		if (!comma)
			return 0;
		value = comma + 1;
	}
	return 0;
}

static int parse_timeout(struct boot *boot, const char *value, size_t length, char reason[MAX_REASON])
{
	unsigned seconds = 0;
	for (size_t i = 0; i < length; i++) {
		if (value[i] < '0' || value[i] > '9')
			return fail(reason, "cocoon.timeout: not a whole number of seconds");
		if (seconds <= LONGEST_TIMEOUT_S)
			seconds = seconds * 10 + (unsigned)(value[i] - '0');
	}
	if (length == 0)
		return fail(reason, "cocoon.timeout: not a whole number of seconds");
	boot->timeout_s = seconds > LONGEST_TIMEOUT_S ? LONGEST_TIMEOUT_S : seconds;
	return 0;
}

static int parse_text(char *into, size_t room, const char *key, const char *value, size_t length,
		      char reason[MAX_REASON])
{
	if (length == 0 || length >= room)
		return fail(reason, "%s: must have 1 to %zu characters", key, room - 1);
	memcpy(into, value, length);
	into[length] = '\0';
	return 0;
}

static int parse_hostname(struct boot *boot, const char *value, size_t length, char reason[MAX_REASON])
{
	for (size_t i = 0; i < length; i++) {
		char c = value[i];
		int letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
		if (!letter && !(c >= '0' && c <= '9') && c != '-' && c != '.')
			return fail(reason, "cocoon.hostname: only letters, digits, '-' and '.'");
	}
	return parse_text(boot->hostname, sizeof boot->hostname, "cocoon.hostname", value, length, reason);
}

/* Kernel rule: a bare key or "=1" switches on, "=0" off. */
static int parse_flag(const char *value, size_t length)
{
	return !(length == 1 && value[0] == '0');
}

static int is_key(const char *word, size_t length, const char *key)
{
	return strlen(key) == length && memcmp(word, key, length) == 0;
}

static int parse_word(struct boot *boot, const char *word, size_t length, char reason[MAX_REASON])
{
	const char *equals = memchr(word, '=', length);
	size_t key = equals ? (size_t)(equals - word) : length;
	const char *value = equals ? equals + 1 : word + length;
	size_t rest = (size_t)(word + length - value);

	if (is_key(word, key, "cocoon.layers"))
		return parse_layers(boot, value, rest, reason);
	if (is_key(word, key, "cocoon.cow")) {
		if (set_serial(boot->cow, value, rest) < 0)
			return fail(reason, "cocoon.cow: a serial has 1 to %d characters", MAX_SERIAL);
		return 0;
	}
	if (is_key(word, key, "cocoon.timeout"))
		return parse_timeout(boot, value, rest, reason);
	if (is_key(word, key, "cocoon.hostname"))
		return parse_hostname(boot, value, rest, reason);
	if (is_key(word, key, "sandbox.init")) {
		if (rest == 0 || value[0] != '/')
			return fail(reason, "sandbox.init: must be an absolute path");
		return parse_text(boot->init, sizeof boot->init, "sandbox.init", value, rest, reason);
	}
	if (is_key(word, key, "sandbox.debug"))
		boot->debug = parse_flag(value, rest);
	if (is_key(word, key, "sandbox.trace"))
		boot->trace = parse_flag(value, rest);
	return 0;
}

int cmdline_parse(const char *text, struct boot *boot, char reason[MAX_REASON])
{
	char later[MAX_REASON];
	int status = 0;

	memset(boot, 0, sizeof *boot);
	boot->timeout_s = DEFAULT_TIMEOUT_S;
	strcpy(boot->init, "/sbin/init");
	while (*text) {
		size_t length;
		text += strspn(text, " \t\r\n");
		length = strcspn(text, " \t\r\n");
		/* The first fault is the one told; what follows it is read on for sandbox.debug. */
		if (length && parse_word(boot, text, length, status < 0 ? later : reason) < 0)
			status = -1;
		text += length;
	}
	if (status < 0)
		return status;
	if (boot->layer_count == 0)
		return fail(reason, "cocoon.layers is missing: give the serials of the layer disks, bottom first");
	if (!boot->cow[0])
		return fail(reason, "cocoon.cow is missing: give the serial of the copy-on-write disk");
	return 0;
}
