"""Writing a file so that readers see the old one or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from guestd.files.paths import require_regular, typed

_NAME_ROOM = 200


class AtomicFile:
    """A file being written beside its final name. Blocking; `abandon` unless `commit` returned.

    The directory is held open, so that a renamed parent changes nothing.
    """

    def __init__(self, path: bytes, mode: int | None) -> None:
        """Opens the temporary file. Follows a symbolic link at `path`.

        Raises: CocoonError as FileService.Write says.
        """
        self.path = path
        self.size = 0
        try:
            target = os.path.realpath(path)
            self._name = os.path.basename(target)  # noqa: PTH119 - bytes
            self._folder = os.open(
                os.path.dirname(target),  # noqa: PTH120 - bytes
                os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC,
            )
        except OSError as error:
            raise typed(error, path) from error
        try:
            self._mode, self._owner = self._look(mode)
            self._temporary = b".%s.%s.tmp" % (self._name[:_NAME_ROOM], secrets.token_hex(8).encode())
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
        except OSError as error:
            os.close(self._folder)
            raise typed(error, path) from error
        except BaseException:
            os.close(self._folder)
            raise

    def _look(self, mode: int | None) -> tuple[int, tuple[int, int] | None]:
        """Returns mode and owner for the new file; those of the old one unless told otherwise."""
        try:
            old = os.stat(self._name or b".", dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return (0o644 if mode is None else mode), None
        if stat.S_ISLNK(old.st_mode):
            # realpath leaves a loop as it is; replacing it would not be following it.
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        require_regular(old.st_mode, self.path)
        kept = stat.S_IMODE(old.st_mode) if mode is None else mode
        return kept, (old.st_uid, old.st_gid)

    def append(self, data: bytes) -> None:
        """Writes more. Raises: CocoonError."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise typed(error, self.path) from error
        self.size += len(data)

    def commit(self) -> None:
        """Puts the file in place. Raises: CocoonError; then abandon it."""
        try:
            if self._owner is not None:
                os.fchown(self._fd, *self._owner)
            os.fchmod(self._fd, self._mode)
            # Some file systems report a full disk only here.
            fd, self._fd = self._fd, -1
            os.close(fd)
            os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            raise typed(error, self.path) from error
        self._temporary = b""

    def close(self) -> None:
        """Gives everything back; without a commit the temporary file is removed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._folder)
            self._temporary = b""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
