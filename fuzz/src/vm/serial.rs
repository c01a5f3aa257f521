//! The serial port, with any accesses to its registers and any input.
//!
//! Every register must read as in a second model of the 16550A; the guest's output and input must be in order, with at
//! most as much input as the FIFO holds; and no interrupt that the driver has enabled may be missing.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SeekFrom, ftruncate, memfd_create};
use virtio_devices::CharDevice;
use vmm::testing::SerialSteps;

use crate::input::{Input, Seed};

/// Capacity of the FIFO.
const FIFO: usize = 64;

// Registers.
const DATA: u8 = 0;
const INTERRUPT_ENABLE: u8 = 1;
const INTERRUPT_IDENTIFICATION: u8 = 2;
const LINE_CONTROL: u8 = 3;
const MODEM_CONTROL: u8 = 4;
const LINE_STATUS: u8 = 5;
const MODEM_STATUS: u8 = 6;
const SCRATCH: u8 = 7;

const DIVISOR_LATCH: u8 = 0x80;
const LOOPBACK: u8 = 0x10;
const RECEIVED: u8 = 4;
const SENT: u8 = 2;

// The kinds of operation.
const WRITE: u8 = 0;
const READ: u8 = 1;
const TYPE: u8 = 2;
const RESET: u8 = 3;
const KINDS: u8 = 4;

thread_local! {
    /// Destination of output: an in-memory file, which never makes the guest wait.
    static OUTPUT: OwnedFd = memfd_create("output", MemfdFlags::CLOEXEC).expect("the host makes files in memory");
}

/// The registers.
struct Rules {
    divisor: [u8; 2],
    enabled: u8,
    /// The causes of interrupts, [`RECEIVED`] and [`SENT`], since the driver's last check.
    causes: u8,
    line_control: u8,
    modem_control: u8,
    scratch: u8,
    fifo: VecDeque<u8>,
    /// True if an interrupt was raised, or the input's thread woken, since the last check.
    interrupt: bool,
    wake: bool,
    sent: Vec<u8>,
}

impl Rules {
    fn new(sent: Vec<u8>) -> Self {
        Self {
            divisor: [12, 0],
            enabled: 0,
            causes: 0,
            line_control: 3,
            modem_control: 8,
            scratch: 0,
            fifo: VecDeque::new(),
            interrupt: false,
            wake: false,
            sent,
        }
    }

    /// Raises an enabled cause once until the driver has checked it.
    fn cause(&mut self, cause: u8) {
        let enabled = self.enabled & if cause == RECEIVED { 1 } else { 2 } != 0;
        if enabled && self.causes & cause == 0 {
            self.causes |= cause;
            self.interrupt = true;
        }
    }

    fn has_received_data(&self) -> bool {
        self.enabled & 1 != 0 && !self.fifo.is_empty()
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.fifo.extend(bytes);
        if !bytes.is_empty() {
            self.cause(RECEIVED);
        }
    }

    fn write(&mut self, register: u8, value: u8) {
        let latched = self.line_control & DIVISOR_LATCH != 0;
        match register {
            DATA | INTERRUPT_ENABLE if latched => self.divisor[usize::from(register)] = value,
            DATA if self.modem_control & LOOPBACK != 0 => {
                let room = FIFO - self.fifo.len();
                self.receive(&[value][..room.min(1)]);
            }
            DATA => {
                self.sent.push(value);
                self.cause(SENT);
            }
            INTERRUPT_ENABLE => {
                self.enabled = value & 15;
                if !self.fifo.is_empty() {
                    self.cause(RECEIVED);
                }
                self.cause(SENT);
            }
            LINE_CONTROL => self.line_control = value,
            MODEM_CONTROL => self.modem_control = value,
            SCRATCH => self.scratch = value,
            _ => {}
        }
    }

    fn read(&mut self, register: u8) -> u8 {
        let latched = self.line_control & DIVISOR_LATCH != 0;
        match register {
            DATA | INTERRUPT_ENABLE if latched => self.divisor[usize::from(register)],
            DATA => {
                self.causes &= !RECEIVED;
                let byte = self.fifo.pop_front().unwrap_or(0);
                self.wake |= self.fifo.is_empty();
                byte
            }
            INTERRUPT_ENABLE => self.enabled,
            INTERRUPT_IDENTIFICATION => match std::mem::take(&mut self.causes) {
                // Until all of it is read.
                0 if self.has_received_data() => 0xc0 | RECEIVED,
                0 => 0xc1,
                causes => 0xc0 | causes,
            },
            LINE_CONTROL => self.line_control,
            MODEM_CONTROL => self.modem_control,
            // The transmitter is always empty.
            LINE_STATUS => 0x60 | u8::from(!self.fifo.is_empty()),
            MODEM_STATUS if self.modem_control & LOOPBACK != 0 => {
                let [dtr, rts, out1, out2] = [1, 2, 4, 8].map(|bit| self.modem_control & bit != 0);
                u8::from(rts) << 4 | u8::from(dtr) << 5 | u8::from(out1) << 6 | u8::from(out2) << 7
            }
            MODEM_STATUS => 0xb0,
            SCRATCH => self.scratch,
            _ => 0,
        }
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of bytes that the guest sent and read, and of interrupts.
fn run_to_end(input: &[u8]) -> (usize, usize, usize) {
    let mut input = Input::new(input);
    let output = OUTPUT.with(|output| {
        ftruncate(output, 0).and_then(|()| rustix::fs::seek(output, SeekFrom::Start(0))).expect("a file");
        output.try_clone().expect("a descriptor is left")
    });
    let device = CharDevice::over(None, output).expect("a character device").with_patience(Duration::ZERO);
    let port = SerialSteps::new(device).expect("an eventfd");
    let (mut rules, mut typed, mut read, mut interrupts) = (Rules::new(Vec::new()), 0, 0, 0);
    while !input.is_empty() {
        match input.u8() % KINDS {
            WRITE => {
                let (register, value) = (input.u8() % 9, input.u8());
                port.write(register, value);
                rules.write(register, value);
            }
            READ => {
                let register = input.u8() % 9;
                read += usize::from(register == DATA && !rules.fifo.is_empty());
                assert_eq!(port.read(register), rules.read(register), "register {register}");
            }
            TYPE => {
                let bytes: Vec<u8> = (typed..typed + usize::from(input.u8())).map(|n| (n % 255) as u8).collect();
                let was_pending = rules.causes & RECEIVED != 0;
                let taken = port.receive(&bytes);
                assert_eq!(taken, bytes.len().min(FIFO - rules.fifo.len()), "the FIFO has another size");
                // The line is disconnected in loop-back mode.
                if rules.modem_control & LOOPBACK == 0 {
                    rules.receive(&bytes[..taken]);
                }
                // The guest may have lost the pending interrupt.
                rules.interrupt |= was_pending && rules.has_received_data();
                typed += taken;
            }
            _ => {
                port.reset();
                rules = Rules { wake: true, ..Rules::new(rules.sent) };
            }
        }
        interrupts += usize::from(rules.interrupt);
        assert_eq!(port.take_interrupt(), std::mem::take(&mut rules.interrupt), "an interrupt too many, or too few");
        assert_eq!(port.take_wake(), std::mem::take(&mut rules.wake), "the reader of input waits for ever, or not");
    }
    let mut output = vec![0; rules.sent.len() + 1];
    let len = OUTPUT.with(|file| rustix::io::pread(file, &mut output, 0)).expect("a file");
    assert!(output[..len] == rules.sent, "the output is not what was sent");
    (rules.sent.len(), read, interrupts)
}

/// Seeds: output with interrupts; input, read after an interrupt, and more of it than fits; loop-back; the divisor
/// latch; a reset.
pub fn seeds() -> Vec<Vec<u8>> {
    let send = |seed: Seed, text: &[u8]| text.iter().fold(seed, |seed, byte| seed.with([WRITE, DATA, *byte]));
    let reads = |seed: Seed, count: usize| (0..count).fold(seed, |seed, _| seed.with([READ, LINE_STATUS, READ, DATA]));
    let sent = send(Seed::new().with([WRITE, INTERRUPT_ENABLE, 2, READ, INTERRUPT_IDENTIFICATION]), b"hello");
    let typed = Seed::new().with([WRITE, INTERRUPT_ENABLE, 1, TYPE, 3, READ, INTERRUPT_IDENTIFICATION]);
    let typed = reads(typed, 4);
    let full = reads(Seed::new().with([TYPE, 60, TYPE, 60]), 65).with([WRITE, INTERRUPT_ENABLE, 1]);
    let looped = send(Seed::new().with([WRITE, MODEM_CONTROL, LOOPBACK, READ, MODEM_STATUS]), b"loop").with([TYPE, 5]);
    let looped = reads(looped, 4);
    let latched = Seed::new().with([WRITE, LINE_CONTROL, DIVISOR_LATCH, WRITE, DATA, 1, READ, DATA, READ, 1, READ, 8]);
    let reset = send(Seed::new().with([TYPE, 4, RESET]), b"after");
    [sent, typed, full, looped, latched, reset].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_send_and_receive() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(done, [(5, 0, 2), (0, 3, 1), (0, 64, 0), (0, 4, 0), (0, 0, 0), (5, 0, 0)]);
    }
}
