//! Frames as they arrive on a connection.

use std::io::{self, Read};

use super::loader::{LoadError, Loader};
use super::wire::{Frame, GREETING, Greeting, HEADER, Header, Kind, MAX_BODY, Pages, WireError};

/// Size of the buffer for pages on their way to guest memory, in bytes.
const BUFFER: usize = 256 << 10;

/// Reason why nothing more is read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The connection fails, or its time is up.
    #[error("the connection to the peer: {0}")]
    Lost(#[from] io::Error),
    /// The peer sends something else.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Pages that the guest does not have.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// A frame, or the table of one whose pages follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A frame.
    Frame(Frame),
    /// Pages, whose bytes are to be read next, by [`Incoming::load`].
    Pages(Pages),
}

/// The frames of a connection. Its buffer is as long as it is, whatever comes.
#[derive(Debug)]
pub struct Incoming<R> {
    reader: R,
    buffer: Box<[u8]>,
}

impl<R: Read> Incoming<R> {
    /// Frames from `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader, buffer: vec![0; BUFFER.max(MAX_BODY)].into() }
    }

    /// Reader that the frames come from.
    pub const fn reader(&self) -> &R {
        &self.reader
    }

    /// The greeting, with which a connection begins.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the peer is another program.
    pub fn greeting(&mut self) -> Result<Greeting, ReadError> {
        let mut bytes = [0; GREETING];
        self.reader.read_exact(&mut bytes)?;
        Ok(Greeting::read(&bytes)?)
    }

    /// The next frame.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the peer sends something else.
    pub fn receive(&mut self) -> Result<Item, ReadError> {
        let mut header = [0; HEADER];
        self.reader.read_exact(&mut header)?;
        let Header { kind, len } = Header::read(header)?;
        if kind == Kind::Pages {
            return self.table(len).map(Item::Pages);
        }
        let body = self.buffer.get_mut(..len as usize).ok_or(WireError::Short)?;
        self.reader.read_exact(body)?;
        Ok(Item::Frame(Frame::read(kind, body)?))
    }

    fn table(&mut self, len: u32) -> Result<Pages, ReadError> {
        let mut count = [0; 8];
        if (len as usize) < count.len() {
            return Err(WireError::Short.into());
        }
        self.reader.read_exact(&mut count)?;
        let table = Pages::table_len(count)?;
        if count.len() + table > len as usize {
            return Err(WireError::Short.into());
        }
        let table = self.buffer.get_mut(..table).ok_or(WireError::Short)?;
        self.reader.read_exact(table)?;
        Ok(Pages::read(table, len)?)
    }

    /// Reads the bytes of `pages`, and puts them into the guest's memory.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the guest has no such memory.
    pub fn load(&mut self, pages: &Pages, loader: &Loader) -> Result<(), ReadError> {
        for range in pages.ranges() {
            if range.is_zero {
                loader.clear(range.start, range.len.into())?;
                continue;
            }
            let (mut start, mut left) = (range.start, range.len as usize);
            while left > 0 {
                let part = left.min(self.buffer.len());
                let bytes = self.buffer.get_mut(..part).ok_or(WireError::Short)?;
                self.reader.read_exact(bytes)?;
                loader.write(start, bytes)?;
                start += part as u64;
                left -= part;
            }
        }
        Ok(())
    }
}
