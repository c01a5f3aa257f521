//! Output of events: `--event-monitor`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use thiserror::Error;
use virtio_devices::{create_file, why_no_file};

use crate::config::grammar::{PathOrFd, path_or_fd};
use crate::error_kind::ErrorKind;
use crate::passed_fd;
use crate::telemetry::rotated::Rotated;

/// Output of events: `path=<path>` or `fd=<number>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventMonitor {
    /// A file, which is created or appended to, or a named pipe, possibly without a reader.
    Path(PathBuf),
    /// An open descriptor of this process, above 2.
    Fd(RawFd),
}

/// Error of the event output.
#[derive(Debug, Error)]
pub enum MonitorError {
    /// The text has neither form.
    #[error("--event-monitor {0}: give path=<path> or fd=<number>")]
    Syntax(String),
    /// The path cannot be opened.
    #[error("--event-monitor path={}: {}", path.display(), why_no_file(path, error))]
    Path {
        /// The path.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The descriptor is not open for writing.
    #[error("--event-monitor fd={0}: not a file descriptor open for writing; open it before the program starts")]
    Fd(RawFd),
}

impl MonitorError {
    /// The kind of this error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Syntax(_) => ErrorKind::Syntax,
            Self::Path { .. } | Self::Fd(_) => ErrorKind::Host,
        }
    }
}

impl FromStr for EventMonitor {
    type Err = MonitorError;

    fn from_str(text: &str) -> Result<Self, MonitorError> {
        match path_or_fd(text) {
            Some(PathOrFd::Path(path)) => Ok(Self::Path(path)),
            Some(PathOrFd::Fd(fd)) => Ok(Self::Fd(fd)),
            None => Err(MonitorError::Syntax(text.to_string())),
        }
    }
}

/// The opened output.
#[derive(Debug)]
pub(crate) enum Output {
    /// An open file. One that was opened by its path can be opened again.
    Open(File, Option<Rotated>),
    /// A named pipe without a reader.
    NoReader(PathBuf),
    /// None: events go to the log alone.
    LogAlone,
}

impl EventMonitor {
    /// Opens the output, without waiting for a reader.
    ///
    /// # Errors
    ///
    /// Fails if the output can never be written.
    pub(crate) fn open(&self) -> Result<Output, MonitorError> {
        match self {
            Self::Path(path) => open(path).map_err(|error| MonitorError::Path { path: path.clone(), error }),
            Self::Fd(fd) => duplicate(*fd).map(|file| Output::Open(file, None)).ok_or(MonitorError::Fd(*fd)),
        }
    }
}

impl Output {
    /// Takes the file that can be opened again.
    pub(super) fn take_rotated(&mut self) -> Option<Rotated> {
        match self {
            Self::Open(_, rotated) => rotated.take(),
            Self::NoReader(_) | Self::LogAlone => None,
        }
    }

    /// Returns the open file, if there is one, after waiting for a pipe's reader.
    ///
    /// # Errors
    ///
    /// Fails if the pipe is gone.
    pub(crate) fn wait(self) -> io::Result<Option<File>> {
        let path = match self {
            Self::Open(file, _) => return Ok(Some(file)),
            Self::LogAlone => return Ok(None),
            Self::NoReader(path) => path,
        };
        let file = OpenOptions::new().append(true).open(path)?;
        fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::NONBLOCK)?;
        Ok(Some(file))
    }
}

/// Opens `path` for writing. With O_NONBLOCK, opening a pipe without a reader fails with ENXIO.
fn open(path: &Path) -> io::Result<Output> {
    match create_file(path, false, OFlags::NONBLOCK) {
        Ok(file) => {
            let rotated = Rotated::new(path, &file);
            Ok(Output::Open(file, rotated))
        }
        Err(error) => {
            let is_pipe = || fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_fifo());
            let has_no_reader = error.raw_os_error() == Some(libc::ENXIO) && is_pipe();
            if has_no_reader { Ok(Output::NoReader(path.to_owned())) } else { Err(error) }
        }
    }
}

/// Duplicates descriptor `fd`, if it is open for writing. `fd` itself keeps its blocking mode.
fn duplicate(fd: RawFd) -> Option<File> {
    let own = passed_fd::duplicate(fd)?;
    let mode = fcntl_getfl(&own).ok()? & OFlags::RWMODE;
    (mode != OFlags::RDONLY).then(|| own.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_or_a_descriptor_is_named_by_its_key() {
        let parse = |text: &str| text.parse::<EventMonitor>().ok();
        assert_eq!(parse("path=/run/e"), Some(EventMonitor::Path("/run/e".into())));
        assert_eq!(parse("path=\"a,b\""), Some(EventMonitor::Path("a,b".into())));
        assert_eq!(parse("fd=7"), Some(EventMonitor::Fd(7)));
        for wrong in ["", "/run/e", "path=", "fd=2", "fd=x", "fd=-1", "path=a,fd=3", "file=a", "path=\"a"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        let said = "bare".parse::<EventMonitor>().unwrap_err().to_string();
        assert_eq!(said, "--event-monitor bare: give path=<path> or fd=<number>");
    }

    #[test]
    fn a_link_is_refused_and_the_file_that_it_names_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let said = EventMonitor::Path(link).open().unwrap_err().to_string();
        assert!(said.contains("it is a symbolic link, and links are not followed"), "{said}");
        assert_eq!(fs::read(&file).unwrap(), b"old");
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let said = EventMonitor::Path(folder.path().to_owned()).open().unwrap_err().to_string();
        assert!(said.contains("cannot be made: Is a directory"), "{said}");
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(EventMonitor::Path(socket).open().is_err());
        assert!(EventMonitor::Fd(900_000).open().is_err());
        let read_only = File::open("/dev/null").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&read_only);
        assert!(EventMonitor::Fd(fd).open().is_err());
    }
}
