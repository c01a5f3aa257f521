//! Writer of whole texts, also on a full disk.

use std::fs::File;
use std::io::{self, Seek as _, Write};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Writer of whole texts.
///
/// A full disk may accept part of a text. The rest is then written before any other text, so that a reader that counts
/// braces stays in step. Texts that do not fit are dropped.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    output: W,
    /// Unwritten rest of the last text.
    rest: Vec<u8>,
    /// Number of bytes of that text that were written.
    taken: usize,
}

impl<W: Room> Writer<W> {
    /// Writes to `output`.
    pub(crate) const fn new(output: W) -> Self {
        Self { output, rest: Vec::new(), taken: 0 }
    }

    /// Writes `text`, waiting for room in a pipe.
    ///
    /// # Errors
    ///
    /// Fails with the system's error if no byte of `text` was written. After a partial write it succeeds, and the rest
    /// is written later.
    pub(crate) fn write(&mut self, text: &str) -> io::Result<()> {
        self.write_rest()?;
        (self.rest, self.taken) = (text.as_bytes().to_vec(), 0);
        match self.write_rest() {
            Err(error) if self.taken == 0 => {
                self.rest.clear();
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Continues with `output`, after the rest of the last text. Returns false if that was lost: there was no room.
    pub(crate) fn replace(&mut self, output: W) -> bool {
        let is_complete = self.write_rest().is_ok();
        if !is_complete {
            self.output.take_back(self.taken);
        }
        (self.output, self.rest, self.taken) = (output, Vec::new(), 0);
        is_complete
    }

    /// Writes the rest of a text, or removes the part already written if there is still no room.
    pub(crate) fn end(mut self) {
        if self.write_rest().is_err() {
            self.output.take_back(self.taken);
        }
    }

    fn write_rest(&mut self) -> io::Result<()> {
        while !self.rest.is_empty() {
            self.output.wait()?;
            match self.output.write(&self.rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.taken += written;
                    self.rest.drain(..written.min(self.rest.len()));
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// An output with support for waiting and undoing.
pub(crate) trait Room: Write {
    /// Waits until the output accepts bytes, or has failed.
    fn wait(&self) -> io::Result<()>;
    /// Removes the last `bytes` written, if possible and nothing follows them.
    fn take_back(&mut self, bytes: usize);
}

impl Room for File {
    /// A passed descriptor may be in blocking mode.
    fn wait(&self) -> io::Result<()> {
        match poll(&mut [PollFd::new(self, PollFlags::OUT)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Pipes accept a whole event or nothing, and have no position.
    fn take_back(&mut self, bytes: usize) {
        let Ok(end) = self.stream_position() else { return };
        let is_last = self.metadata().is_ok_and(|file| file.is_file() && file.len() == end);
        if let Some(start) = end.checked_sub(bytes as u64).filter(|_| is_last) {
            // A failure leaves a partial text, which cannot be helped.
            let _ = self.set_len(start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for `room` bytes.
    struct Disk {
        written: Vec<u8>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.room);
            if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.written.extend(&bytes[..count]);
            self.room -= count;
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Room for &mut Disk {
        fn wait(&self) -> io::Result<()> {
            Ok(())
        }

        fn take_back(&mut self, bytes: usize) {
            self.written.truncate(self.written.len() - bytes);
        }
    }

    #[test]
    fn text_cut_by_a_full_disk_is_completed_before_the_next() {
        let mut disk = Disk { written: Vec::new(), room: 15 };
        let mut writer = Writer::new(&mut disk);
        writer.write("{first  }\n").unwrap();
        writer.write("{second }\n").unwrap();
        for _ in 0..3 {
            writer.write("{dropped}\n").unwrap_err();
        }
        writer.output.room = 7;
        writer.write("{third  }\n").unwrap();
        writer.output.room = 30;
        writer.write("{fourth }\n").unwrap();
        writer.end();
        assert_eq!(String::from_utf8(disk.written).unwrap(), "{first  }\n{second }\n{third  }\n{fourth }\n");
    }

    #[test]
    fn a_new_file_begins_with_a_whole_text() {
        for (room, is_complete) in [(10, true), (3, false)] {
            let [mut full, mut new] = [15, 100].map(|room| Disk { written: Vec::new(), room });
            let mut writer = Writer::new(&mut full);
            writer.write("{first  }\n").unwrap();
            writer.write("{second }\n").unwrap();
            writer.output.room = room;
            assert_eq!(writer.replace(&mut new), is_complete);
            writer.write("{third  }\n").unwrap();
            writer.end();
            let old = if is_complete { "{first  }\n{second }\n" } else { "{first  }\n" };
            assert_eq!(String::from_utf8(full.written).unwrap(), old);
            assert_eq!(new.written, b"{third  }\n");
        }
    }

    #[test]
    fn text_that_never_fits_is_removed_at_the_end() {
        let mut disk = Disk { written: Vec::new(), room: 15 };
        let mut writer = Writer::new(&mut disk);
        writer.write("{first  }\n").unwrap();
        writer.write("{second }\n").unwrap();
        writer.end();
        assert_eq!(disk.written, b"{first  }\n");
    }

    #[test]
    fn only_the_end_of_a_file_is_taken_back() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"first second").unwrap();
        file.take_back(6);
        assert_eq!(file.metadata().unwrap().len(), 6);
        file.rewind().unwrap();
        file.take_back(0);
        assert_eq!(file.metadata().unwrap().len(), 6, "something follows");
    }
}
