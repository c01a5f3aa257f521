//! The serial port without its thread, for fuzz targets.

use std::io;
use std::sync::Arc;

use virtio_devices::CharDevice;

use super::SerialPort;

/// A serial port whose caller delivers input.
#[derive(Debug)]
pub struct SerialSteps(SerialPort);

impl SerialSteps {
    /// Creates a port that writes to `output`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(output: CharDevice) -> io::Result<Self> {
        SerialPort::new(Arc::new(output)).map(Self)
    }

    /// Reads the register at `offset`.
    pub fn read(&self, offset: u8) -> u8 {
        self.0.read(offset)
    }

    /// Writes the register at `offset`.
    pub fn write(&self, offset: u8, value: u8) {
        self.0.write(offset, value);
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        self.0.reset();
    }

    /// Receives `input` as far as it fits, as the reader does. Returns the number of bytes received.
    pub fn receive(&self, input: &[u8]) -> usize {
        let taken = input.get(..self.0.room()).unwrap_or(input);
        self.0.receive(taken);
        taken.len()
    }

    /// True if there was an interrupt since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.0.interrupt.read().is_ok()
    }

    /// True if the reader was woken since the last call.
    pub fn take_wake(&self) -> bool {
        self.0.room.read().is_ok()
    }
}
