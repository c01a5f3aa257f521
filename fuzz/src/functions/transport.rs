//! A virtio function compared with a second implementation of the standard's rules: the transport's registers, accessed
//! through memory and through the PCI configuration access capability, its queues, and its vectors.
//!
//! The device behind it starts no threads and accepts any queues, even invalid ones. After each operation the registers
//! must read as expected, the queues must run exactly when they should, and the messages that may be sent must follow
//! from the registers, with every change reported by an effect. Occasionally a function restored from the saved state
//! replaces the function, which must not be visible; a function restored from a modified state either refuses it or
//! matches it.

mod pair;
mod restore;
mod rules;
mod seeds;

use crate::input::Input;
use pair::{MSIX_BAR, PBA, Pair, REGISTERS_BAR};
pub use seeds::seeds;

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the device status, true if the queues run, and the number of messages that may be sent.
fn run_to_end(input: &[u8]) -> (u8, bool, usize) {
    let mut input = Input::new(input);
    let mut pair = Pair::new();
    pair.compare();
    while !input.is_empty() {
        pair.apply(&mut input);
    }
    // Compare what cannot be read without side effects, and the registers of all queues.
    pair.bar_read(REGISTERS_BAR, 0x100, 1);
    pair.bar_read(MSIX_BAR, PBA, 8);
    for queue in 0..4u16 {
        let _ = pair.bar_write(REGISTERS_BAR, 0x16, &queue.to_le_bytes());
        pair.compare();
    }
    (pair.rules.status, pair.rules.running, pair.messages().len())
}
