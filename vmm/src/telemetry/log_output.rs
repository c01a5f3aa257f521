//! Output of the log: standard error, or the file of `--log-file`.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustix::fs::OFlags;
use virtio_devices::create_file;

use crate::telemetry::rotated::Rotated;

/// Output of the log. All threads write to it, without a lock: each line is one write.
#[derive(Debug)]
pub struct LogOutput {
    to: Destination,
    /// The file, if it can be opened again. Only the control thread locks this.
    rotated: Mutex<Option<Rotated>>,
    /// Number of lines that were not written, or only in part.
    lost: AtomicU64,
    /// The last write may have left half a line: the disk was full.
    broken: AtomicBool,
}

#[derive(Debug)]
enum Destination {
    Stderr,
    File(ArcSwap<File>),
}

impl LogOutput {
    /// Sends the log to standard error.
    pub const fn stderr() -> Self {
        Self {
            to: Destination::Stderr,
            rotated: Mutex::new(None),
            lost: AtomicU64::new(0),
            broken: AtomicBool::new(false),
        }
    }

    /// Appends the log to the file at `path`, or sends it to a named pipe, which need not have a reader yet.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn file(path: &Path) -> io::Result<Self> {
        // A pipe opened for reading, too, needs no other reader. Output that does not fit is dropped, so that no
        // thread waits.
        let is_pipe = std::fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo());
        let flags = if is_pipe { OFlags::NONBLOCK } else { OFlags::empty() };
        let file = create_file(path, is_pipe, flags)?;
        let rotated = Mutex::new(Rotated::new(path, &file));
        let (lost, broken) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Self { to: Destination::File(ArcSwap::from_pointee(file)), rotated, lost, broken })
    }

    /// Opens the file at its path again, if another file or none is there now.
    ///
    /// # Errors
    ///
    /// Fails with one line. The log continues in the former file.
    pub(crate) fn reopen(&self) -> Result<(), String> {
        let (Destination::File(file), Some(rotated)) = (&self.to, &mut *self.rotated.lock()) else { return Ok(()) };
        if let Some(new) = rotated.reopen()? {
            file.store(Arc::new(new));
            self.broken.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Number of lines that were not written, or only in part.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Write for &LogOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.to {
            Destination::Stderr => io::stderr().write(bytes),
            Destination::File(file) => file.load().as_ref().write(bytes),
        }
    }

    /// Writes a line. It is counted if that fails.
    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        // Without a newline, this line would end the half one. A single write keeps others out.
        let was_broken = self.broken.load(Ordering::Relaxed);
        let whole = if was_broken { &[b"\n", line].concat()[..] } else { line };
        let mut left = whole;
        let mut written = Ok(());
        while !left.is_empty() && written.is_ok() {
            match self.write(left) {
                Ok(0) => written = Err(ErrorKind::WriteZero.into()),
                Ok(len) => left = left.get(len..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => written = Err(error),
            }
        }
        if written.is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        // A pipe that is full takes nothing, and has no half line then.
        if left.len() < whole.len() {
            self.broken.store(!left.is_empty(), Ordering::Relaxed);
        }
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::pipe::PipeFlags;

    use super::*;

    #[test]
    fn log_continues_in_a_new_file_after_a_rename() {
        let folder = tempfile::tempdir().unwrap();
        let [path, old] = ["log", "log.1"].map(|name| folder.path().join(name));
        fs::write(&path, "of an earlier start\n").unwrap();
        let log = LogOutput::file(&path).unwrap();
        (&log).write_all(b"first\n").unwrap();
        fs::rename(&path, &old).unwrap();
        (&log).write_all(b"second\n").unwrap();
        log.reopen().unwrap();
        (&log).write_all(b"third\n").unwrap();
        log.reopen().unwrap();
        (&log).write_all(b"fourth\n").unwrap();
        assert_eq!(fs::read_to_string(old).unwrap(), "of an earlier start\nfirst\nsecond\n");
        assert_eq!(fs::read_to_string(path).unwrap(), "third\nfourth\n");
        assert_eq!(log.lost(), 0);
    }

    #[test]
    fn a_line_after_half_a_line_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = LogOutput::file(&path).unwrap();
        let Destination::File(file) = &log.to else { unreachable!() };
        let lose = |line: &[u8], into: File| {
            let own = file.swap(Arc::new(into));
            (&log).write_all(line).unwrap_err();
            file.store(own);
        };
        // Nothing of a line leaves no half line.
        lose(b"lost\n", File::options().write(true).open("/dev/full").unwrap());
        (&log).write_all(b"first\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first\n");
        let (_reader, pipe) = rustix::pipe::pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).unwrap();
        rustix::pipe::fcntl_setpipe_size(&pipe, 4096).unwrap();
        lose(&[b'x'; 8192], pipe.into());
        (&log).write_all(b"second\n").unwrap();
        (&log).write_all(b"third\n").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "first\n\nsecond\nthird\n");
    }

    #[test]
    fn lines_that_do_not_fit_are_counted() {
        let log = LogOutput::file(Path::new("/dev/full")).unwrap();
        for _ in 0..3 {
            (&log).write_all(b"line\n").unwrap_err();
        }
        assert_eq!(log.lost(), 3);
        log.reopen().unwrap();
    }
}
