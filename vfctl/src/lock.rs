//! Waiting for the lock of a file, up to a time. The kernel wakes who waits, in order.

use std::fs::File;
use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Takes the lock of `file` (`flock(2)`), which ends with the file. `None` if others have it until `until`.
///
/// # Errors
///
/// Errors of the system calls, and of starting a thread, which waits while others have the lock.
pub fn lock(file: File, until: Instant) -> io::Result<Option<File>> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(Some(file)),
        Err(Errno::WOULDBLOCK | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Ok(None);
    }
    let (sender, receiver) = mpsc::channel();
    let wait = move || {
        let locked = loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                locked => break locked,
            }
        };
        // A caller that no longer waits leaves the file to this thread, which closes it.
        let _ = sender.send(locked.map(|()| file));
    };
    thread::Builder::new().name("lock".into()).spawn(wait)?;
    match receiver.recv_timeout(left) {
        Ok(locked) => Ok(Some(locked?)),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    fn open(path: &Path) -> File {
        File::options().write(true).create(true).truncate(false).open(path).unwrap()
    }

    fn much_later() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    #[test]
    fn who_waits_has_the_lock_when_its_holder_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock(open(&path), Instant::now()).unwrap().unwrap();
        assert!(lock(open(&path), Instant::now()).unwrap().is_none());
        let waiting = open(&path);
        let inode = format!(":{} ", waiting.metadata().unwrap().ino());
        let waiter = thread::spawn(move || lock(waiting, much_later()));
        // `/proc/locks` shows those that wait with an arrow.
        let is_it = |line: &str| line.contains("-> FLOCK") && line.contains(&inode);
        let waits = || std::fs::read_to_string("/proc/locks").unwrap().lines().any(is_it);
        while !waits() {
            thread::yield_now();
        }
        assert!(!waiter.is_finished());
        drop(held);
        assert!(waiter.join().unwrap().unwrap().is_some());
    }

    #[test]
    fn who_gave_up_does_not_keep_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock(open(&path), Instant::now()).unwrap();
        let soon = Instant::now() + Duration::from_millis(1);
        assert!(lock(open(&path), soon).unwrap().is_none());
        drop(held);
        assert!(lock(open(&path), much_later()).unwrap().is_some());
    }
}
