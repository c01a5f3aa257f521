//! A virtio function: the registers of the transport, by memory and by the PCI configuration access capability, its queues, and its
//! vectors, against the rules of the standard written out a second time.
//!
//! The device behind it starts no thread: it takes whatever queues it is given, and the queues are the registers' own, nonsense
//! included. After each operation the registers read what they should, the queues run if and only if they should, and what may be
//! sent follows from the registers and was told by an effect. A function that is restored to what another one saved takes its place,
//! and nobody can tell; one that is restored to a state with changes refuses it, or is what the state says.

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

/// As [`run`], and returns the device status, whether the queues run, and how many messages may be sent.
fn run_to_end(input: &[u8]) -> (u8, bool, usize) {
    let mut input = Input::new(input);
    let mut pair = Pair::new();
    pair.compare();
    while !input.is_empty() {
        pair.apply(&mut input);
    }
    // What cannot be read without being changed, and the registers of all queues.
    pair.bar_read(REGISTERS_BAR, 0x100, 1);
    pair.bar_read(MSIX_BAR, PBA, 8);
    for queue in 0..4u16 {
        let _ = pair.bar_write(REGISTERS_BAR, 0x16, &queue.to_le_bytes());
        pair.compare();
    }
    (pair.rules.status, pair.rules.running, pair.messages().len())
}
