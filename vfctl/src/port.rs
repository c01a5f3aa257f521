//! A named port of a virtio console: found in sysfs, opened without waiting, read and written with a time limit.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::error::Error;
use crate::lock;
use crate::roots::Roots;

/// Time between two attempts to get what another program has.
const AGAIN: Duration = Duration::from_millis(5);

/// Time until a port that the VMM has not opened is looked at again by a program that waits without limit.
const LATER: Duration = Duration::from_millis(200);

/// An open port. Closing it makes the VMM drop replies that were not read.
#[derive(Debug)]
pub(crate) struct Port {
    file: File,
    path: PathBuf,
}

/// The device node of the port `name`. The kernel shows the names of ports below `class/virtio-ports`.
pub(crate) fn find(roots: &Roots, name: &'static str) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(roots.sys.join("class/virtio-ports")).map_err(|_| Error::NoChannel { port: name })?;
    let is_it = |path: &PathBuf| fs::read_to_string(path.join("name")).is_ok_and(|text| text.trim_end() == name);
    let found = entries.flatten().map(|entry| entry.path()).find(is_it);
    let node = found.as_ref().and_then(|path| path.file_name()).map(|node| roots.dev.join(node));
    node.ok_or(Error::NoChannel { port: name })
}

/// Takes the lock `path`, which ends with the file. `None` if the guest has no folder for it: the kernel lets one
/// program open the port at a time anyway, and the lock only makes others wait in order.
pub(crate) fn lock(path: &Path, until: Instant) -> Result<Option<File>, Error> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ReadOnlyFilesystem) => return Ok(None),
        Err(error) => return Err(failed(path, error)),
    };
    let locked = lock::lock(file, until).map_err(|error| failed(path, error))?;
    locked.map(Some).ok_or_else(|| Error::Busy(path.to_owned()))
}

impl Port {
    /// Opens a port. Waits until `until` if another program has it open.
    pub(crate) fn open(path: PathBuf, until: Instant) -> Result<Self, Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed());
        let file = attempt(&path, until, || options.open(&path))?;
        Ok(Self { file, path })
    }

    /// Writes all bytes. Returns false if that takes longer than `until`.
    pub(crate) fn write(&mut self, mut bytes: &[u8], until: Instant) -> Result<bool, Error> {
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !self.wait(PollFlags::OUT, Some(until))? {
                        return Ok(false);
                    }
                }
                Err(error) => return Err(failed(&self.path, error)),
            }
        }
        Ok(true)
    }

    /// Reads some bytes. Returns 0 if there are none until `until`; `None` waits without limit.
    pub(crate) fn read(&mut self, buffer: &mut [u8], until: Option<Instant>) -> Result<usize, Error> {
        loop {
            match self.file.read(buffer) {
                Ok(0) => {} // The VMM has the port, and has not opened it.
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(&self.path, error)),
            }
            if !self.wait(PollFlags::IN, until)? {
                return Ok(0);
            }
        }
    }

    /// Waits until the port is ready for `flags`. Returns false after `until`.
    fn wait(&self, flags: PollFlags, until: Option<Instant>) -> Result<bool, Error> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        let limit = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [PollFd::new(&self.file, flags)];
        match poll(&mut polled, limit.as_ref()) {
            // A port that the VMM has not opened is always ready for this one event.
            Ok(_) if polled.iter().any(|one| one.revents() == PollFlags::HUP) => {
                thread::sleep(if until.is_some() { AGAIN } else { LATER });
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(failed(&self.path, error.into())),
        }
        Ok(true)
    }
}

/// Tries until no other program has `path`, or until `until`.
fn attempt<T>(path: &Path, until: Instant, mut this: impl FnMut() -> io::Result<T>) -> Result<T, Error> {
    loop {
        match this() {
            Err(error) if is_busy(&error) && Instant::now() < until => thread::sleep(AGAIN),
            result => return result.map_err(|error| failed(path, error)),
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ResourceBusy | ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn failed(path: &Path, error: io::Error) -> Error {
    let path = path.to_owned();
    match error.kind() {
        _ if is_busy(&error) => Error::Busy(path),
        ErrorKind::NotFound => Error::NoNode(path),
        ErrorKind::PermissionDenied => Error::NoPermission(path),
        _ => Error::Io { path, error },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_port_is_tried_until_it_is_free() {
        let mut left = 3;
        let mut open = || {
            left -= 1;
            if left > 0 { Err(io::Error::from(Errno::BUSY)) } else { Ok(7) }
        };
        let until = Instant::now() + Duration::from_secs(3600);
        assert_eq!(attempt(Path::new("/dev/vport1p1"), until, &mut open).unwrap(), 7);
        let always = || -> io::Result<()> { Err(Errno::BUSY.into()) };
        let error = attempt(Path::new("/dev/vport1p1"), Instant::now(), always).unwrap_err();
        assert_eq!(error.to_string(), "/dev/vport1p1: another program uses the channel; try again");
    }

    #[test]
    fn each_reason_has_its_line() {
        let line = |errno: Errno| failed(Path::new("/dev/vport1p1"), errno.into()).to_string();
        assert_eq!(line(Errno::ACCESS), "/dev/vport1p1: no permission; run this as root");
        assert_eq!(line(Errno::PERM), line(Errno::ACCESS));
        assert!(line(Errno::NOENT).ends_with("run this where /dev is the guest's own, not in a container"));
        assert!(line(Errno::NODEV).starts_with("/dev/vport1p1: No such device"));
    }
}
