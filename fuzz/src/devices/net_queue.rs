//! The receive and transmit queues of a NIC, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! The first byte of the input chooses the queue, the next ones the features. Some chains leave the device free to do
//! anything; the run ends with the first of those.

mod receive;
mod transmit;

use crate::guest::{self, NEXT, OFFER, WRITE};
use crate::input::{Input, Seed};
use receive::Receive;
use transmit::Transmit;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const HEADER: usize = 12;

// Feature bits (`virtio 1.4 §5.1.3`).
const CSUM: u32 = 0;
const GUEST_CSUM: u32 = 1;
const HOST_TSO4: u32 = 11;
const HOST_TSO6: u32 = 12;
const HOST_ECN: u32 = 13;
const HOST_UFO: u32 = 14;
const MRG_RXBUF: u32 = 15;
const EVENT_IDX: u32 = 29;
const HOST_USO: u32 = 56;

// The kinds of operation, after those of the driver.
const RUN: u8 = guest::KINDS;
const FRAME: u8 = guest::KINDS + 1;
const LINK: u8 = guest::KINDS + 2;
const KINDS: u8 = guest::KINDS + 3;

// The choices of the first byte.
const TRANSMIT: u8 = 0;
const RECEIVE: u8 = 1;
const RECEIVE_LONG: u8 = 3;

/// Course of the run after an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    GoesOn,
    /// The ring is invalid, or the device may do anything.
    Ends,
}

fn has(features: u64, bit: u32) -> bool {
    features >> bit & 1 == 1
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of frames sent or received, and of those dropped.
fn run_to_end(input: &[u8]) -> (u64, u64) {
    let mut input = Input::new(input);
    let choice = input.u8();
    let features = u64::from(input.u32()) | u64::from(choice >> 7) << HOST_USO;
    if choice & 1 == TRANSMIT {
        let mut transmit = Transmit::new(&mut input, features);
        while !input.is_empty() && transmit.apply(&mut input) == Then::GoesOn {}
        transmit.finish()
    } else {
        Receive::new(&mut input, features, choice & 2 != 0).run(&mut input)
    }
}

fn start(choice: u8, features: &[u32]) -> Seed {
    let features = features.iter().fold(0u32, |features, bit| features | 1 << bit);
    // A queue of 8 descriptors.
    Seed::new().with([choice]).with(features.to_le_bytes()).with([1])
}

/// Makes a frame available to the device: its length, its number of pieces, and its flags, GSO type, GSO size and
/// checksum.
fn frame(seed: Seed, len: u16, pieces: u8, [flags, gso, size, checksum]: [u8; 4]) -> Seed {
    seed.with([FRAME]).with(len.to_le_bytes()).with([pieces, flags, gso, size, checksum])
}

/// Makes a frame available, and sends it before the next one.
fn send(seed: Seed, len: u16, pieces: u8, kind: [u8; 4]) -> Seed {
    frame(seed, len, pieces, kind).with([RUN])
}

/// Makes a receive buffer of descriptor `index` available.
fn provide(seed: Seed, index: u8, len: u16) -> Seed {
    let at = guest::BUFFERS + u32::from(index) * 0x800;
    guest::descriptor(seed, index, (at, len, WRITE, 0)).with([OFFER, index])
}

/// Gives the backend a frame.
fn arrive(seed: Seed, len: u16, choice: u8) -> Seed {
    seed.with([FRAME]).with(len.to_le_bytes()).with([choice])
}

/// Seeds: frames sent and received with and without merged buffers and event indexes, long frames, and invalid
/// chains.
pub fn seeds() -> Vec<Vec<u8>> {
    const OFFLOADS: &[u32] = &[CSUM, HOST_TSO4, HOST_TSO6, HOST_ECN, HOST_UFO, EVENT_IDX];
    let plain = frame(frame(start(TRANSMIT, &[]), 60, 1, [0; 4]), 1514, 3, [0; 4]).with([RUN]);
    let offloads = send(start(TRANSMIT, OFFLOADS), 4000, 2, [1, 1, 100, 34]);
    let offloads = send(send(offloads, 4000, 1, [1, 0x84, 100, 40]), 4000, 1, [1, 3, 100, 34]).with([RUN]);
    let at_the_end = send(send(start(TRANSMIT, OFFLOADS), 60, 1, [1, 0, 0, 52]), 60, 1, [1, 0, 0, 53]).with([RUN]);
    let refused = [(0, [0; 4]), (13, [0; 4]), (60, [1, 0, 0, 60]), (60, [0, 2, 0, 0]), (60, [0, 1, 0, 0])];
    let refused = refused.into_iter().fold(start(TRANSMIT, OFFLOADS), |seed, (len, kind)| send(seed, len, 1, kind));
    let long = send(send(start(TRANSMIT, &[]), 65_535, 3, [0; 4]), 60, 1, [0; 4]).with([RUN]);
    let link = send(start(TRANSMIT, &[]).with([LINK, 0]), 60, 1, [0; 4]).with([RUN, LINK, 1]);
    let uso = send(start(TRANSMIT | 0x80, OFFLOADS), 4000, 1, [1, 5, 100, 34]).with([RUN]);
    let wrong_way = provide(start(TRANSMIT, &[]), 0, 100).with([RUN]);
    let endless = guest::descriptor(start(TRANSMIT, &[]), 0, (guest::BUFFERS, 8, NEXT, 0)).with([OFFER, 0, RUN]);

    let buffers = |seed, count, len| (0..count).fold(seed, |seed, index| provide(seed, index, len));
    let single = buffers(start(RECEIVE, &[GUEST_CSUM]), 4, 1526);
    let single = arrive(arrive(arrive(single, 72, 0), 1526, 0), 1527, 0).with([RUN]);
    let merged = arrive(buffers(start(RECEIVE, &[MRG_RXBUF, EVENT_IDX]), 4, 512), 1500, 0).with([RUN]);
    let merged = buffers(arrive(merged, 2000, 0).with([RUN]), 4, 512).with([RUN]);
    let filtered = arrive(arrive(buffers(start(RECEIVE, &[MRG_RXBUF]), 2, 512).with([LINK, 3]), 100, 1), 100, 0);
    let mixed = buffers(start(RECEIVE, &[MRG_RXBUF]), 8, 0x800).with([LINK, 3]);
    let lengths = (60..116).step_by(8).chain([1400]);
    let mixed = lengths.fold(mixed, |seed, len| arrive(arrive(seed, len, 0), len, 1).with([RUN]));
    let down = arrive(buffers(start(RECEIVE, &[MRG_RXBUF]), 2, 512).with([LINK, 0]), 100, 0).with([RUN, LINK, 1]);
    let useless = provide(provide(start(RECEIVE, &[]), 0, 11), 1, 100);
    let useless = arrive(useless.with([OFFER, 12]), 60, 0).with([RUN]);
    let same_buffer =
        |seed, flags| (0..8).fold(seed, |seed, n| guest::descriptor(seed, n, (guest::BUFFERS, 0x4000, flags, n + 1)));
    let too_long = guest::descriptor(same_buffer(start(TRANSMIT, &[]), NEXT), 7, (guest::BUFFERS, 0x10, 0, 0));
    let too_long = too_long.with([OFFER, 0, RUN]);
    let large = same_buffer(start(RECEIVE_LONG, &[MRG_RXBUF]), WRITE);
    let large = (0..8).fold(large, |seed, index| seed.with([OFFER, index]));
    let large = arrive(arrive(large, 65_535, 0).with([RUN]), 60, 0).with([RUN]);
    let spilled = arrive(buffers(start(RECEIVE_LONG, &[MRG_RXBUF]), 6, 0x800), 12_000, 0).with([RUN]);
    let row = arrive(buffers(start(RECEIVE_LONG, &[MRG_RXBUF]), 8, 0x800), 4096, 0).with([RUN]);
    let row = arrive(row, 12_000, 0).with([RUN]);
    let received = [single, merged, filtered.with([RUN]), down, useless, large, spilled, row, mixed];
    let sent = [plain, offloads, refused.with([RUN]), long, link, uso, wrong_way, endless, too_long, at_the_end];
    sent.into_iter().chain(received).map(Seed::done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_send_receive_and_drop() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let sent = [(2, 0), (3, 0), (0, 5), (2, 0), (0, 1), (1, 0), (0, 1), (0, 1), (0, 1), (1, 1)];
        let received = [(2, 1), (2, 0), (1, 1), (0, 1), (1, 0), (2, 0), (1, 0), (2, 0), (8, 7)];
        assert_eq!(done, [&sent[..], &received[..]].concat());
    }
}
