//! The debug console: an I/O port for characters, and its host side.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use virtio_devices::{CharDevice, NewThread, Thread};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::config::{ConsoleConfig, ConsoleMode, DebugConsoleConfig};
use crate::exits::{Device, PortHandler};
use crate::serial::end::{ConsoleEnd, ConsoleError};
use crate::threads::{self, ThreadKind};

const OPTION: &str = "--debug-console";
/// Value of a read, which shows software that the port exists.
const PRESENT: u8 = 0xe9;

/// The debug console of a VM.
#[derive(Debug)]
pub(crate) struct DebugConsole {
    port: u16,
    end: ConsoleEnd,
    /// In mode `Pty`, the thread that waits for a reader at the other end.
    _keeper: Option<Keeper>,
}

impl DebugConsole {
    /// Opens the debug console of `config`; `None` if it is off.
    ///
    /// # Errors
    ///
    /// Fails if the host side cannot be opened.
    pub(crate) fn open(config: &DebugConsoleConfig) -> Result<Option<Self>, ConsoleError> {
        let DebugConsoleConfig { mode, file, iobase } = config.clone();
        // Without input, it does not read the terminal.
        let Some(end) = ConsoleEnd::open(OPTION, &ConsoleConfig { file, ..ConsoleConfig::new(mode) }, false)? else {
            return Ok(None);
        };
        let keeper = (mode == ConsoleMode::Pty).then(|| Keeper::start(Arc::clone(end.device())));
        let keeper = keeper.transpose().map_err(|error| ConsoleError::host(OPTION, error))?;
        Ok(Some(Self { port: iobase, end, _keeper: keeper }))
    }

    /// Host side of the console.
    pub(crate) const fn end(&self) -> &ConsoleEnd {
        &self.end
    }

    /// I/O port of the console.
    pub(crate) fn device(&self) -> Device {
        let handler = Arc::new(DebugPort(Arc::clone(self.end.device())));
        Device { ports: self.port..self.port.saturating_add(1), handler }
    }
}

/// Guest side of the port.
struct DebugPort(Arc<CharDevice>);

impl PortHandler for DebugPort {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        for (byte, value) in data.iter_mut().zip(std::iter::once(PRESENT).chain(std::iter::repeat(0xff))) {
            *byte = value;
        }
    }

    /// The port has 8 bits; the ports after it do not exist.
    fn write(&self, _offset: u16, data: &[u8]) {
        self.0.write(data.get(..1).unwrap_or_default());
    }
}

/// Thread that sends kept output when a pseudo-terminal's other end is opened, and drops input.
#[derive(Debug)]
struct Keeper {
    stop: Arc<EventFd>,
    thread: Option<Thread>,
}

impl Keeper {
    fn start(device: Arc<CharDevice>) -> io::Result<Self> {
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let run = move || while let Ok(true) = keep(&device, &stopped) {};
        let kind = ThreadKind::DebugConsole;
        // The calls of this thread are shallow.
        let thread = threads::start(kind, NewThread::new(kind.name(), 64 << 10, run))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // After a panic there is nothing left to do.
            let _ = thread.join();
        }
    }
}

/// Waits for the other end to be opened, or for input. Returns false once `stop` is signalled.
fn keep(device: &CharDevice, stop: &EventFd) -> io::Result<bool> {
    // SAFETY: the eventfd stays open while it is borrowed.
    let stop = unsafe { BorrowedFd::borrow_raw(stop.as_raw_fd()) };
    let woken = device.wait([stop], true)?;
    if woken.input {
        match device.read(&mut [0; 64]) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
    }
    let [stop] = woken.others;
    Ok(!stop)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Read, Write};

    use super::*;

    fn open(text: &str) -> DebugConsole {
        DebugConsole::open(&text.parse().unwrap()).unwrap().unwrap()
    }

    #[test]
    fn debug_port_writes_a_character_and_reads_as_present() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("debug");
        let console = open(&format!("file={},iobase=0x402", path.display()));
        let Device { ports, handler } = console.device();
        assert_eq!(ports, 0x402..0x403);
        handler.write(0, b"a");
        handler.write(0, b"bc");
        handler.write(0, b"");
        assert_eq!(fs::read_to_string(path).unwrap(), "ab");
        let mut data = [0; 2];
        handler.read(0, &mut data);
        assert_eq!(data, [0xe9, 0xff]);
        assert!(DebugConsole::open(&"off".parse().unwrap()).unwrap().is_none());
    }

    #[test]
    fn late_opener_of_the_pty_reads_earlier_output() {
        let console = open("pty");
        console.device().handler.write(0, b"h");
        console.device().handler.write(0, b"i");
        let path = console.end().device().pty().unwrap();
        let mut terminal = File::options().read(true).write(true).open(path).unwrap();
        // Input of the debug console is dropped.
        terminal.write_all(b"ignored").unwrap();
        let mut text = [0; 2];
        terminal.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hi");
    }
}
