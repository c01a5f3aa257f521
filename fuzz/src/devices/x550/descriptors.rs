//! Descriptors of any bytes, and results of any values.
//!
//! The oracle takes bits out of a descriptor as one number of 128 bits.

use x550::descriptor::{LEN, Received, Transmit, receive_buffer};

use crate::input::{Input, Seed};

/// `len` bits of a descriptor from bit `at` on.
fn bits(descriptor: u128, at: u32, len: u32) -> u64 {
    (descriptor >> at & ((1 << len) - 1)) as u64
}

/// Runs the descriptors of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the numbers of contexts, buffers, others and results.
fn run_to_end(input: &[u8]) -> [usize; 4] {
    let (mut input, mut seen) = (Input::new(input), [0; 4]);
    while !input.is_empty() {
        if input.u8() & 1 == 0 {
            seen[transmit(input.array())] += 1;
        } else {
            result(&mut input);
            seen[3] += 1;
        }
    }
    seen
}

fn transmit(bytes: [u8; LEN]) -> usize {
    let all = u128::from_le_bytes(bytes);
    let of = |at, len| bits(all, at, len);
    let is = |at| of(at, 1) == 1;
    assert_eq!(receive_buffer(&bytes), of(0, 64));
    match Transmit::parse(&bytes) {
        Transmit::Context(context) => {
            assert!(is(64 + 29) && of(64 + 20, 4) == 2);
            let lengths = [context.ip_len, context.mac_len.into(), context.l4_len.into(), context.mss].map(u64::from);
            assert_eq!(lengths, [of(0, 9), of(9, 7), of(96 + 8, 8), of(96 + 16, 16)]);
            let numbers = [context.vlan, context.index.into(), context.l4_type.into()].map(u64::from);
            assert_eq!(numbers, [of(16, 16), of(96 + 4, 3), of(64 + 11, 2)]);
            assert_eq!(context.is_ipv4, is(64 + 10));
            0
        }
        Transmit::Data(data) => {
            assert!(is(64 + 29) && of(64 + 20, 4) == 3);
            assert_eq!((data.address, u64::from(data.len)), (of(0, 64), of(64, 16)));
            assert_eq!(u64::from(data.payload), of(96 + 14, 18));
            let flags = [data.ends, data.reports, data.inserts_vlan, data.segments];
            assert_eq!(flags, [24, 27, 30, 31].map(|at| is(64 + at)));
            assert_eq!([data.ip_checksum, data.l4_checksum], [is(96 + 8), is(96 + 9)]);
            assert_eq!(data.context.map(u64::from), is(96 + 7).then(|| of(96 + 4, 3)));
            1
        }
        Transmit::Other => {
            assert!(!is(64 + 29) || ![2, 3].contains(&of(64 + 20, 4)));
            2
        }
    }
}

fn result(input: &mut Input<'_>) {
    let [flags, more, rss_type] = input.array();
    let check = |flag: u8| (more & flag != 0).then_some(more & flag << 1 != 0);
    let received = Received {
        len: input.u16(),
        ends: flags & 1 != 0,
        rss_type,
        rss_hash: input.u32(),
        packet_type: input.u16(),
        vlan: (flags & 2 != 0).then(|| input.u16()),
        ip_checked: check(1),
        l4_checked: check(4),
        is_local: flags & 4 != 0,
    };
    let all = u128::from_le_bytes(received.to_bytes());
    let is = |at| bits(all, at, 1) == 1;
    assert_eq!(bits(all, 0, 4), u64::from(received.rss_type) & 0xf);
    assert_eq!(bits(all, 4, 13), u64::from(received.packet_type) & 0x1fff);
    assert_eq!((bits(all, 17, 15), bits(all, 32, 32)), (0, received.rss_hash.into()));
    assert_eq!(bits(all, 96, 16), u64::from(received.len));
    assert_eq!(bits(all, 112, 16), u64::from(received.vlan.unwrap_or(0)));
    let shown = [0, 1, 3, 5, 6, 18, 30, 31].map(|at| is(64 + at));
    let Received { ends, vlan, l4_checked, ip_checked, is_local, .. } = received;
    let wrong = [l4_checked == Some(false), ip_checked == Some(false)];
    let [l4_wrong, ip_wrong] = wrong;
    let checked = [l4_checked.is_some(), ip_checked.is_some()];
    assert_eq!(shown, [true, ends, vlan.is_some(), checked[0], checked[1], is_local, l4_wrong, ip_wrong]);
    let known = [0u32, 1, 3, 5, 6, 18, 30, 31].iter().fold(0, |known, at| known | 1u64 << at);
    assert_eq!(bits(all, 64, 32) & !known, 0, "no other bit of the status");
}

/// Seeds: a segmented frame of TCP, a plain one, a legacy descriptor, and results with and without offloads.
pub fn seeds() -> Vec<Vec<u8>> {
    let descriptor = |seed: Seed, dwords: [u32; 4]| seed.with([0]).with(dwords.map(u32::to_le_bytes).concat());
    let context = [14 << 9 | 20, 0, 1 << 29 | 2 << 20 | 1 << 11 | 1 << 10, 1460 << 16 | 20 << 8];
    let data = [0x1000, 1, 0x8b30_0040 | 1 << 29, 3 << 8 | 1 << 7 | 9000 << 14];
    let sent = [context, data, [0x1000, 0, 0xb00_003c, 0]].into_iter().fold(Seed::new(), descriptor);
    let received = [[3, 0b1111, 1], [1, 0b0101, 7], [5, 0, 0xff]]
        .into_iter()
        .fold(Seed::new(), |seed, head| seed.with([1]).with(head).with([60, 0, 1, 2, 3, 4, 0x11, 0x20, 7, 0]));
    [sent, received].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_have_each_kind_of_descriptor() {
        let seen: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(seen[0], [1, 1, 1, 0]);
        assert!(seen[1][3] >= 3, "{seen:?}");
    }
}
