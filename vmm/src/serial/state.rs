//! Saved state of a serial port.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_devices::CounterText;
use vm_superio::Serial;

use super::{Interrupt, NONE_PENDING, Room, SerialPort, has_received_data};

/// Saved state of a serial port: registers, and unread input.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerialState {
    /// Divisor latch, low and high.
    pub divisor: [u8; 2],
    /// Interrupt enable.
    pub interrupt_enable: u8,
    /// Interrupt identification.
    pub interrupt_identification: u8,
    /// Line control.
    pub line_control: u8,
    /// Line status.
    pub line_status: u8,
    /// Modem control.
    pub modem_control: u8,
    /// Modem status.
    pub modem_status: u8,
    /// Scratch.
    pub scratch: u8,
    /// Input in order of arrival.
    pub input: Vec<u8>,
}

/// Descriptions of what [`SerialPort::counters`] reads.
pub(crate) const TEXTS: [CounterText; 4] = [
    text(
        "interrupt_enable",
        "bits",
        "Value of the register by which the driver enables interrupts (IER), as it is now.",
    ),
    text(
        "interrupt_identification",
        "bits",
        "Value of the register that names the pending interrupt (IIR), as it is now.",
    ),
    text("line_status", "bits", "Value of the register that shows received data and room to send (LSR), as it is now."),
    text("unread_bytes", "bytes", "Input that the guest has not read yet; a guest that hangs leaves it unread."),
];

const fn text(name: &'static str, unit: &'static str, text: &'static str) -> CounterText {
    CounterText { name, unit, is_loss: false, text }
}

impl SerialPort {
    /// Returns the state to save. No vCPU may be in an access.
    pub fn save(&self) -> SerialState {
        let state = self.uart.lock().state();
        SerialState {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        }
    }

    /// Returns registers that show why a guest's driver may wait, and the number of unread bytes, by name.
    pub fn counters(&self) -> [(&'static str, u64); 4] {
        let state = self.uart.lock().state();
        let values = [
            state.interrupt_enable.into(),
            state.interrupt_identification.into(),
            state.line_status.into(),
            state.in_buffer.len() as u64,
        ];
        std::array::from_fn(|n| (TEXTS[n].name, values[n]))
    }

    /// Restores `state`. [`Self::remind`] sends the pending interrupt. Returns false without a change if the input does
    /// not fit.
    #[must_use]
    pub fn restore(&self, state: &SerialState) -> bool {
        let is_possible = self.set(state);
        let _ = self.interrupt.read();
        is_possible
    }

    /// Sends the pending interrupt again, because it may have been missed.
    pub fn remind(&self) {
        let uart = self.uart.lock();
        if uart.state().interrupt_identification & NONE_PENDING == 0 || has_received_data(&uart) {
            let _ = self.interrupt.write(1);
        }
    }

    /// Sets `state`, which sends an interrupt if one is pending.
    fn set(&self, state: &SerialState) -> bool {
        let [baud_divisor_low, baud_divisor_high] = state.divisor;
        let registers = vm_superio::serial::SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.input.clone(),
        };
        let (interrupt, room) = (Interrupt(Arc::clone(&self.interrupt)), Room(Arc::clone(&self.room)));
        let Ok(uart) = Serial::from_state(&registers, interrupt, room, Vec::new()) else { return false };
        *self.uart.lock() = uart;
        // There may be more room now than the reader waits for.
        let _ = self.room.write(1);
        true
    }
}
