//! The serial port: a 16550A, and its host side.
//!
//! Input that the guest does not read stays in the terminal, pipe or socket.
//!
//! Output never blocks a vCPU permanently. If nothing reads it, the writing vCPU waits up to
//! [`virtio_devices::PATIENCE`], once. Further output is dropped until it is read again, as on a line without flow
//! control. In the meantime other vCPUs can use the registers, unless they also write.

pub(crate) mod debug;
pub mod end;
mod state;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod terminal;

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::{CharDevice, NewThread, PassedSockets, Thread};
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::config::ConsoleConfig;
use crate::serial::end::{ConsoleEnd, ConsoleError};
pub use crate::serial::state::SerialState;
pub(crate) use crate::serial::state::TEXTS as COUNTER_TEXTS;
use crate::threads::{self, ThreadKind};

/// Guest side of the serial port.
#[derive(Debug)]
pub struct SerialPort {
    /// Registers, and written bytes that are not sent yet: at most one per vCPU.
    uart: Mutex<Uart>,
    /// Locked before `uart` when sending those bytes, to keep their order.
    output: Mutex<Arc<CharDevice>>,
    interrupt: Arc<EventFd>,
    room: Arc<EventFd>,
}

type Uart = Serial<Interrupt, Room, Vec<u8>>;

impl SerialPort {
    fn new(output: Arc<CharDevice>) -> io::Result<Self> {
        let interrupt = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let room = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let uart = Mutex::new(uart(&interrupt, &room));
        Ok(Self { uart, output: Mutex::new(output), interrupt, room })
    }

    /// Returns an eventfd that is signalled for each interrupt of the port.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Reads the register at `offset`, 0 to 7.
    pub fn read(&self, offset: u8) -> u8 {
        let mut uart = self.uart.lock();
        let value = uart.read(offset);
        // The crate withdraws this interrupt after the first byte is read. A 16550A keeps it until all bytes are read.
        if offset == INTERRUPT_IDENTIFICATION && value & NONE_PENDING != 0 && has_received_data(&uart) {
            return value & !NONE_PENDING | RECEIVED_DATA;
        }
        value
    }

    /// Writes the register at `offset`, 0 to 7.
    pub fn write(&self, offset: u8, value: u8) {
        let pending = {
            let mut uart = self.uart.lock();
            // Appending a byte cannot fail, and with a full eventfd an interrupt is pending.
            let _ = uart.write(offset, value);
            !uart.writer().is_empty()
        };
        if pending {
            self.send();
        }
    }

    /// Sends pending bytes, possibly also another vCPU's.
    fn send(&self) {
        let output = self.output.lock();
        let bytes = mem::take(self.uart.lock().writer_mut());
        output.write(&bytes);
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        let mut uart = self.uart.lock();
        *uart = self::uart(&self.interrupt, &self.room);
        // An interrupt of the old guest must not reach the next one.
        let _ = self.interrupt.read();
        let _ = self.room.write(1);
    }

    /// Number of input bytes that the port has room for.
    fn room(&self) -> usize {
        self.uart.lock().fifo_capacity()
    }

    fn receive(&self, bytes: &[u8]) {
        let mut uart = self.uart.lock();
        // The crate sends no edge while this is pending. If the guest has missed it, no later byte would wake the
        // guest.
        let is_pending = uart.state().interrupt_identification & RECEIVED_DATA != 0;
        // In loop-back mode the line is disconnected, and input is dropped.
        let _ = uart.enqueue_raw_bytes(bytes);
        if is_pending && has_received_data(&uart) {
            let _ = self.interrupt.write(1);
        }
    }
}

/// Offset of the interrupt identification register, and its values (PC16550D §8.6).
const INTERRUPT_IDENTIFICATION: u8 = 2;
const NONE_PENDING: u8 = 1;
const RECEIVED_DATA: u8 = 4;

/// True if the guest has unread input, and has enabled its interrupt.
fn has_received_data(uart: &Uart) -> bool {
    let state = uart.state();
    state.interrupt_enable & 1 != 0 && !state.in_buffer.is_empty()
}

fn uart(interrupt: &Arc<EventFd>, room: &Arc<EventFd>) -> Uart {
    Serial::with_events(Interrupt(Arc::clone(interrupt)), Room(Arc::clone(room)), Vec::new())
}

/// The port's interrupt line, which is edge-triggered.
#[derive(Debug)]
struct Interrupt(Arc<EventFd>);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Wakes the input reader once the guest has read all input.
#[derive(Debug)]
struct Room(Arc<EventFd>);

impl SerialEvents for Room {
    fn buffer_read(&self) {}

    fn out_byte(&self) {}

    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // A full eventfd has woken the reader already.
        let _ = self.0.write(1);
    }
}

/// The serial port and its host side.
#[derive(Debug)]
pub struct SerialConsole {
    port: Arc<SerialPort>,
    // Drop order: the reader ends before the terminal is restored.
    reader: Option<Reader>,
    end: ConsoleEnd,
}

impl SerialConsole {
    /// Opens the serial port of `config` for output; `None` if it is off. [`Self::read_input`] starts input.
    ///
    /// # Errors
    ///
    /// Fails if the host side cannot be opened.
    pub fn open(config: &ConsoleConfig) -> Result<Option<Self>, ConsoleError> {
        Self::open_with(config, &PassedSockets::default())
    }

    /// As [`Self::open`], with the listener in `passed` if that has one.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::open`] does.
    pub fn open_with(config: &ConsoleConfig, passed: &PassedSockets) -> Result<Option<Self>, ConsoleError> {
        let Some(end) = ConsoleEnd::open_with("--serial", config, true, passed)? else { return Ok(None) };
        let port = SerialPort::new(Arc::clone(end.device())).map_err(|error| ConsoleError::host("--serial", error))?;
        Ok(Some(Self { port: Arc::new(port), reader: None, end }))
    }

    /// In mode `tty`, sets the terminal to raw mode until this is dropped. The caller must already catch signals, so
    /// that the terminal is restored.
    ///
    /// # Errors
    ///
    /// Fails if the terminal cannot be set.
    pub fn take_terminal(&mut self) -> Result<(), ConsoleError> {
        self.end.take_terminal()
    }

    /// Starts reading input. Earlier input stays in the terminal, pipe or socket, because restoring the port would drop
    /// it.
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot be started.
    pub fn read_input(&mut self) -> Result<(), ConsoleError> {
        if self.end.has_input() {
            let reader = Reader::start(Arc::clone(&self.port), Arc::clone(self.end.device()));
            self.reader = Some(reader.map_err(|error| ConsoleError::host("--serial", error))?);
        }
        Ok(())
    }

    /// Guest side of the port.
    pub fn port(&self) -> &Arc<SerialPort> {
        &self.port
    }

    /// Host side of the port.
    pub const fn end(&self) -> &ConsoleEnd {
        &self.end
    }
}

/// The thread that reads input.
#[derive(Debug)]
struct Reader {
    stop: Arc<EventFd>,
    thread: Option<Thread>,
}

impl Reader {
    fn start(port: Arc<SerialPort>, input: Arc<CharDevice>) -> io::Result<Self> {
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let run = move || while let Ok(true) = pass_input(&port, &input, &stopped) {};
        // The calls of this thread are shallow.
        let thread = threads::start(ThreadKind::Serial, NewThread::new(ThreadKind::Serial.name(), 64 << 10, run))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // After a panic there is nothing left to do.
            let _ = thread.join();
        }
    }
}

/// Waits for input and for room in the port, and forwards some input. Returns false at the end of input, or once `stop`
/// is signalled.
fn pass_input(port: &SerialPort, input: &CharDevice, stop: &EventFd) -> io::Result<bool> {
    let room = port.room();
    // SAFETY: both eventfds stay open while they are borrowed.
    let others = [stop, &port.room].map(|fd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) });
    // Without room, input stays in its source.
    let woken = input.wait(others, room > 0)?;
    let [stop, space] = woken.others;
    if space {
        let _ = port.room.read();
    }
    if stop || !woken.input {
        return Ok(!stop);
    }
    let mut bytes = [0; 64];
    let limit = room.min(bytes.len());
    match input.read(&mut bytes[..limit]) {
        Ok(0) => Ok(false),
        Ok(len) => {
            port.receive(&bytes[..len]);
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read, Write};
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use virtio_devices::PATIENCE;

    use super::*;
    use crate::config::ConsoleMode;

    const DATA: u8 = 0;
    const INTERRUPT_ENABLE: u8 = 1;
    const SCRATCH: u8 = 7;

    fn port(patience: Duration) -> (Arc<SerialPort>, PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        let output = CharDevice::over(None, writer.into()).unwrap().with_patience(patience);
        (Arc::new(SerialPort::new(Arc::new(output)).unwrap()), reader)
    }

    fn input_of(input: OwnedFd) -> Arc<CharDevice> {
        let (_reader, writer) = io::pipe().unwrap();
        Arc::new(CharDevice::over(Some(input), writer.into()).unwrap())
    }

    #[test]
    fn bytes_that_the_guest_writes_go_out() {
        let (port, mut reader) = port(PATIENCE);
        for byte in *b"hello" {
            port.write(DATA, byte);
        }
        let mut bytes = [0; 5];
        reader.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, *b"hello");
    }

    #[test]
    fn counters_show_registers_and_unread_input() {
        let (port, _reader) = port(PATIENCE);
        assert_eq!(port.counters().map(|(_, value)| value), [0, NONE_PENDING.into(), 0x60, 0]);
        port.write(INTERRUPT_ENABLE, 1);
        port.receive(b"ls");
        let names = ["interrupt_enable", "interrupt_identification", "line_status", "unread_bytes"];
        let values = [1, RECEIVED_DATA.into(), 0x61, 2];
        assert_eq!(port.counters(), std::array::from_fn(|n| (names[n], values[n])));
        port.read(DATA);
        assert_eq!(port.counters()[3], ("unread_bytes", 1));
    }

    #[test]
    fn untaken_output_is_dropped_until_a_reader_comes() {
        let (port, mut reader) = port(Duration::ZERO);
        let start = Instant::now();
        for _ in 0..70_000 {
            port.write(DATA, b'x');
        }
        // Waiting for a reader at each byte would take days.
        assert!(start.elapsed() < 12 * PATIENCE);
        let mut bytes = vec![0; 70_000];
        let taken = reader.read(&mut bytes).unwrap();
        assert!(taken < bytes.len(), "the pipe held everything");
        port.write(DATA, b'!');
        assert_eq!(reader.read(&mut bytes).unwrap(), 1);
        assert_eq!(bytes[0], b'!');
    }

    #[test]
    fn the_registers_can_be_used_while_output_waits_for_a_reader() {
        let (port, mut reader) = port(12 * PATIENCE);
        let capacity = rustix::pipe::fcntl_getpipe_size(&reader).unwrap();
        port.output.lock().write(&vec![b'x'; capacity]);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| port.write(DATA, b'!'));
            let start = Instant::now();
            while port.output.try_lock().is_some() {
                assert!(start.elapsed() < 12 * PATIENCE, "no thread waits");
                std::thread::yield_now();
            }
            port.write(SCRATCH, 0x5a);
            assert_eq!(port.read(SCRATCH), 0x5a);
            assert!(!waiting.is_finished(), "it does not wait");
            let mut bytes = vec![0; capacity];
            reader.read_exact(&mut bytes).unwrap();
            let mut last = [0];
            reader.read_exact(&mut last).unwrap();
            assert_eq!(last, *b"!");
        });
    }

    #[test]
    fn bytes_of_two_vcpus_are_all_there_and_each_ones_in_order() {
        const EACH: usize = 5_000;
        let (port, mut reader) = port(PATIENCE);
        let bytes = std::thread::scope(|scope| {
            for first in [0, 128] {
                let port = &port;
                scope.spawn(move || (0..EACH).for_each(|n| port.write(DATA, first + (n % 128) as u8)));
            }
            let mut bytes = vec![0; 2 * EACH];
            reader.read_exact(&mut bytes).unwrap();
            bytes
        });
        for first in [0, 128] {
            let own = bytes.iter().filter(|byte| **byte & 128 == first);
            assert!(own.enumerate().all(|(n, byte)| *byte == first + (n % 128) as u8));
        }
    }

    #[test]
    fn output_to_a_reader_that_is_gone_is_dropped() {
        let (port, reader) = port(PATIENCE);
        drop(reader);
        port.write(DATA, b'x');
        assert_eq!(port.read(5) & 0x60, 0x60);
    }

    #[test]
    fn input_arrives_in_order_however_slowly_the_guest_takes_it() {
        let (port, _output) = port(PATIENCE);
        let (input, mut writer) = io::pipe().unwrap();
        let sent: Vec<u8> = (0..=255).collect();
        writer.write_all(&sent).unwrap();
        drop(writer);
        let reader = Reader::start(Arc::clone(&port), input_of(input.into())).unwrap();
        assert_eq!(received(&port, sent.len()), sent);
        drop(reader);
    }

    #[test]
    fn a_reader_without_input_ends_when_it_is_dropped() {
        let (port, _output) = port(PATIENCE);
        let (input, _writer) = io::pipe().unwrap();
        drop(Reader::start(port, input_of(input.into())).unwrap());
    }

    #[test]
    fn input_raises_the_interrupt_and_a_reset_takes_it_back() {
        let (port, _output) = port(PATIENCE);
        port.write(INTERRUPT_ENABLE, 1);
        port.write(SCRATCH, 0x5a);
        port.receive(b"x");
        port.reset();
        assert!(port.interrupt().read().is_err());
        assert_eq!((port.read(INTERRUPT_ENABLE), port.read(SCRATCH), port.read(5) & 1), (0, 0, 0));
        port.write(INTERRUPT_ENABLE, 1);
        port.receive(b"x");
        assert_eq!(port.interrupt().read().unwrap(), 1);
    }

    #[test]
    fn input_interrupts_although_an_earlier_edge_was_lost() {
        let (port, _output) = port(PATIENCE);
        port.write(INTERRUPT_ENABLE, 1);
        for _ in 0..2 {
            port.receive(b"x");
            // The edge is sent, and the guest misses it.
            assert!(port.interrupt().read().is_ok());
        }
    }

    #[test]
    fn received_data_is_pending_until_all_of_it_is_read() {
        let (port, _output) = port(PATIENCE);
        port.write(INTERRUPT_ENABLE, 1);
        port.receive(b"0123456789");
        for byte in *b"0123456789" {
            assert_eq!(port.read(INTERRUPT_IDENTIFICATION) & 0xf, RECEIVED_DATA);
            assert_eq!(port.read(DATA), byte);
        }
        assert_eq!(port.read(INTERRUPT_IDENTIFICATION) & 0xf, NONE_PENDING);
        port.write(INTERRUPT_ENABLE, 0);
        port.receive(b"x");
        assert_eq!(port.read(INTERRUPT_IDENTIFICATION) & 0xf, NONE_PENDING, "it is not enabled");
    }

    #[test]
    fn reminders_lose_no_input_that_arrives_at_the_same_time() {
        const ALL: usize = 2_000;
        let (port, _output) = port(PATIENCE);
        port.write(INTERRUPT_ENABLE, 1);
        let (input, mut writer) = io::pipe().unwrap();
        let sent: Vec<u8> = (0..ALL).map(|n| n as u8).collect();
        let reader = Reader::start(Arc::clone(&port), input_of(input.into())).unwrap();
        let all_read = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&sent).unwrap());
            scope.spawn(|| {
                while !all_read.load(std::sync::atomic::Ordering::Relaxed) {
                    port.remind();
                }
            });
            let (mut read, start) = (Vec::new(), Instant::now());
            while read.len() < ALL && start.elapsed() < Duration::from_secs(60) {
                read.extend(received(&port, 1));
            }
            all_read.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(read == sent, "{} of {ALL} bytes", read.len());
        });
        drop(reader);
    }

    #[test]
    fn a_file_keeps_what_it_has() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("serial");
        std::fs::write(&path, "before ").unwrap();
        let config = ConsoleConfig { file: Some(path.clone()), ..ConsoleConfig::new(ConsoleMode::File) };
        let console = SerialConsole::open(&config).unwrap().unwrap();
        console.port().write(DATA, b'x');
        assert_eq!(std::fs::read(&path).unwrap(), b"before x");
        let config = ConsoleConfig { file: Some(path.join("below a file")), ..config };
        let error = SerialConsole::open(&config).unwrap_err().to_string();
        assert!(error.starts_with("--serial file=") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_pseudo_terminal_is_the_other_end_of_the_line() {
        let mut console = SerialConsole::open(&ConsoleConfig::new(ConsoleMode::Pty)).unwrap().unwrap();
        console.read_input().unwrap();
        let path = console.end().device().pty().unwrap();
        let mut user = std::fs::File::options().read(true).write(true).open(path).unwrap();
        b"login: ".iter().for_each(|byte| console.port().write(DATA, *byte));
        let mut bytes = [0; 7];
        user.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"login: ");
        user.write_all(b"root\r").unwrap();
        assert_eq!(received(console.port(), 5), b"root\r");
    }

    #[test]
    fn clients_of_a_socket_come_and_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("serial");
        let config = ConsoleConfig { socket: Some(path.clone()), ..ConsoleConfig::new(ConsoleMode::Socket) };
        let mut console = SerialConsole::open(&config).unwrap().unwrap();
        console.read_input().unwrap();
        for _ in 0..3 {
            let mut user = std::os::unix::net::UnixStream::connect(&path).unwrap();
            user.write_all(b"ls").unwrap();
            assert_eq!(received(console.port(), 2), b"ls");
            console.port().write(DATA, b'x');
            let mut byte = [0];
            user.read_exact(&mut byte).unwrap();
            assert_eq!(byte, *b"x");
        }
        drop(console);
        assert!(!path.exists());
    }

    /// Returns the input of the guest once it has `len` bytes, or after some seconds.
    fn received(port: &SerialPort, len: usize) -> Vec<u8> {
        let mut received = Vec::new();
        let start = Instant::now();
        while received.len() < len && start.elapsed() < 12 * PATIENCE {
            if port.read(5) & 1 == 1 {
                received.push(port.read(DATA));
            }
        }
        received
    }

    #[test]
    fn off_is_no_port_and_null_is_one_that_drops() {
        assert!(SerialConsole::open(&ConsoleConfig::off()).unwrap().is_none());
        let console = SerialConsole::open(&ConsoleConfig::new(ConsoleMode::Null)).unwrap().unwrap();
        console.port().write(DATA, b'x');
        assert_eq!(console.port().read(5) & 0x60, 0x60);
    }
}
