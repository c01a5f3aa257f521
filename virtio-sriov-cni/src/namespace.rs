//! Network namespaces, and threads that work in them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::fs::{fstat, fstatfs};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// File system type of namespaces (`linux/magic.h`, `NSFS_MAGIC`).
const NSFS: i64 = 0x6e73_6673;
/// The namespace of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// An open network namespace. It exists while this does.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl Namespace {
    /// The namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// Errors of the file system.
    pub fn current() -> io::Result<Self> {
        Ok(Self(File::open(OWN)?.into()))
    }

    /// The namespace at a path. `None` if there is none any longer: a missing file, or one that nothing is mounted on.
    ///
    /// # Errors
    ///
    /// Other errors of the file system.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // The process of `/proc/PID/ns/net` has ended.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            Err(error) => return Err(error),
        };
        let is_namespace = fstatfs(&file)?.f_type == NSFS;
        Ok(is_namespace.then(|| Self(file.into())))
    }

    /// A new namespace with a loopback interface.
    ///
    /// # Errors
    ///
    /// Errors of the system calls, without `CAP_SYS_ADMIN` for example.
    pub fn temporary() -> io::Result<Self> {
        let make = || {
            // SAFETY: a new network namespace for this thread, which has no sockets, affects neither memory nor files.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Self::current()
        };
        in_thread(make)
    }

    /// Runs `work` in a thread in this namespace.
    ///
    /// # Errors
    ///
    /// Errors of starting the thread and of entering the namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        in_thread(|| {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        })
    }

    /// True if both are the same namespace.
    ///
    /// # Errors
    ///
    /// Errors of the system calls.
    pub fn is(&self, other: &Self) -> io::Result<bool> {
        let (one, two) = (fstat(&self.0)?, fstat(&other.0)?);
        Ok((one.st_dev, one.st_ino) == (two.st_dev, two.st_ino))
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Runs `work` in a thread of its own, so that a changed namespace ends with the thread.
fn in_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_without_a_namespace_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("left");
        assert!(Namespace::open(&file).unwrap().is_none());
        std::fs::write(&file, "").unwrap();
        assert!(Namespace::open(&file).unwrap().is_none());
        assert!(Namespace::open(Path::new("/proc/self/ns/net")).unwrap().is_some());
    }

    #[test]
    fn the_namespace_of_this_thread_is_itself() {
        let current = Namespace::current().unwrap();
        assert!(current.is(&Namespace::open(Path::new(OWN)).unwrap().unwrap()).unwrap());
    }
}
