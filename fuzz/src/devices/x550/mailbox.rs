//! The mailboxes of the PF and its VFs, with resets of either side.
//!
//! The oracle is a second mailbox of plain flags for each VF, by the rules of the registers: who owns the buffer, which
//! events wait, and whom each write interrupts.

use x550::{Nic, Place};

use super::{MAC, peek, read, write};
use crate::input::{Input, Seed};

const VFS: usize = 63;
const MAILBOX: u32 = 1 << 19;

/// The registers of a VF as both sides see them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Both {
    pf_owns: bool,
    vf_owns: bool,
    status: bool,
    acknowledged: bool,
    done: bool,
    request: bool,
    answer: bool,
    reset: bool,
    buffer: [u32; 16],
}

/// The rules, a second time.
struct Rules {
    vfs: [Both; VFS],
    in_reset: bool,
    /// MAILBOX in EICR.
    cause: bool,
}

impl Rules {
    fn new() -> Self {
        Self { vfs: [Both::default(); VFS], in_reset: true, cause: false }
    }

    fn vf_register(&self, vf: usize) -> u32 {
        let Both { pf_owns, vf_owns, status, acknowledged, done, .. } = self.vfs[vf];
        let bits = [false, false, vf_owns, pf_owns, status, acknowledged, self.in_reset, done];
        bits.iter().rev().fold(0, |value, bit| value << 1 | u32::from(*bit))
    }

    fn pf_register(&self, vf: usize) -> u32 {
        u32::from(self.vfs[vf].vf_owns) << 2 | u32::from(self.vfs[vf].pf_owns) << 3
    }

    fn events(&self, register: usize) -> u32 {
        (0..16).filter(|n| 16 * register + n < VFS).fold(0, |value, n| {
            let vf = self.vfs[16 * register + n];
            value | u32::from(vf.request) << n | u32::from(vf.answer) << (16 + n)
        })
    }

    fn resets(&self, register: usize) -> u32 {
        (0..32)
            .filter(|n| 32 * register + n < VFS)
            .fold(0, |value, n| value | u32::from(self.vfs[32 * register + n].reset) << n)
    }

    fn reset_vf(&mut self, vf: usize) {
        let own = &mut self.vfs[vf];
        (own.vf_owns, own.status, own.acknowledged, own.reset) = (false, false, false, true);
        self.cause = true;
    }
}

/// Runs the accesses of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of messages that crossed.
fn run_to_end(input: &[u8]) -> usize {
    let (mut nic, mut rules, mut crossed) = (Nic::new(MAC), Rules::new(), 0);
    // Other causes are enabled at vector 1, and clear themselves, so that each one interrupts.
    let set_up = |nic: &mut Nic| {
        for (offset, value) in [(0xa00, 0x8100), (0x810, MAILBOX), (0x880, MAILBOX)] {
            let _ = write(nic, Place::Pf, offset, value);
        }
    };
    set_up(&mut nic);
    for vf in 0..VFS as u16 {
        for (offset, value) in [(0x140, 0x82), (0x110, 7), (0x108, 7)] {
            let _ = write(&mut nic, Place::Vf(vf), offset, value);
        }
    }
    let mut input = Input::new(input);
    while !input.is_empty() {
        let [operation, vf, value] = input.array();
        let vf = usize::from(vf) % VFS;
        let (place, number) = (Place::Vf(vf as u16), vf as u64);
        rules.cause = false;
        match operation % 10 {
            0 | 1 => {
                let sent = write(&mut nic, place, 0x2fc, value.into()).vectors;
                let own = &mut rules.vfs[vf];
                own.vf_owns = value & 4 != 0 && !own.pf_owns;
                own.request |= value & 1 != 0;
                own.answer |= value & 2 != 0;
                let expected = if value & 3 == 0 { vec![] } else { vec![(Place::Pf, 2)] };
                assert_eq!(sent, expected, "VF {vf} writes {value:#x}");
                crossed += sent.len();
            }
            2 | 3 => {
                let sent = write(&mut nic, Place::Pf, 0x4b00 + 4 * number, value.into()).vectors;
                let own = &mut rules.vfs[vf];
                own.vf_owns &= value & 0x10 == 0;
                own.pf_owns = value & 8 != 0 && !own.vf_owns;
                own.status |= value & 1 != 0;
                own.acknowledged |= value & 2 != 0;
                // A vector whose causes clear themselves is sent each time; a VF that was reset has none.
                assert!(sent.is_empty() || value & 3 != 0 && sent == [(place, 4)], "{sent:?}");
                crossed += sent.len();
            }
            4 => {
                let (dword, word) = (usize::from(value & 15), input.u32());
                let of_pf = value & 16 != 0;
                let offset = 4 * dword as u64 + if of_pf { 0x1_3000 + 64 * number } else { 0x200 };
                let _ = write(&mut nic, if of_pf { Place::Pf } else { place }, offset, word);
                rules.vfs[vf].buffer[dword] = word;
            }
            5 => {
                assert_eq!(read(&mut nic, place, 0x2fc), rules.vf_register(vf));
                let own = &mut rules.vfs[vf];
                (own.status, own.acknowledged, own.done) = (false, false, false);
            }
            6 => {
                let register = vf % 4;
                let bits = input.u32();
                let _ = write(&mut nic, Place::Pf, 0x710 + 4 * register as u64, bits);
                for n in (0..16).filter(|n| 16 * register + n < VFS) {
                    let own = &mut rules.vfs[16 * register + n];
                    own.request &= bits >> n & 1 == 0;
                    own.answer &= bits >> (16 + n) & 1 == 0;
                }
            }
            7 => {
                let (register, bits) = (vf % 2, input.u32());
                let _ = write(&mut nic, Place::Pf, 0x700 + 4 * register as u64, bits);
                for n in (0..32).filter(|n| 32 * register + n < VFS && bits >> n & 1 == 1) {
                    rules.vfs[32 * register + n].reset = false;
                }
            }
            8 => {
                let sent = if value & 1 == 0 { write(&mut nic, place, 0, 1 << 26) } else { nic.reset_vf(vf as u16) };
                rules.reset_vf(vf);
                assert_eq!(sent.vectors, [(Place::Pf, 2)]);
            }
            _ if value & 1 == 0 => {
                let _ = write(&mut nic, Place::Pf, 0, 1 << 26);
                set_up(&mut nic);
                rules.in_reset = true;
                for own in &mut rules.vfs {
                    *own = Both { vf_owns: own.vf_owns, buffer: own.buffer, ..Both::default() };
                }
            }
            _ => {
                let _ = write(&mut nic, Place::Pf, 0x18, 1 << 14);
                rules.vfs.iter_mut().filter(|_| rules.in_reset).for_each(|own| own.done = true);
                rules.in_reset = false;
            }
        }
        check(&nic, &rules, vf);
    }
    (0..VFS).for_each(|vf| check(&nic, &rules, vf));
    crossed
}

/// Compares all registers of a VF with the rules.
fn check(nic: &Nic, rules: &Rules, vf: usize) {
    let (place, number) = (Place::Vf(vf as u16), vf as u64);
    assert_eq!(peek(nic, place, 0x2fc), rules.vf_register(vf), "VFMAILBOX of VF {vf}");
    assert_eq!(peek(nic, Place::Pf, 0x4b00 + 4 * number), rules.pf_register(vf), "PFMAILBOX of VF {vf}");
    for register in 0..4 {
        assert_eq!(peek(nic, Place::Pf, 0x710 + 4 * register as u64), rules.events(register), "MBVFICR {register}");
    }
    for (register, read_only) in [(0, 0x600), (1, 0x1c0)] {
        assert_eq!(peek(nic, Place::Pf, 0x700 + 4 * register as u64), rules.resets(register), "VFLREC {register}");
        assert_eq!(peek(nic, Place::Pf, read_only), rules.resets(register), "VFLRE {register}");
    }
    for (dword, expected) in (0..).zip(rules.vfs[vf].buffer) {
        assert_eq!(peek(nic, place, 0x200 + 4 * dword), expected);
        assert_eq!(peek(nic, Place::Pf, 0x1_3000 + 64 * number + 4 * dword), expected);
    }
}

/// Seeds: the handshake of a VF's driver, messages that cross, and resets of both sides.
pub fn seeds() -> Vec<Vec<u8>> {
    let word = |seed: Seed, vf: u8, at: u8, value: u32| seed.with([4, vf, at]).with(value.to_le_bytes());
    let handshake = |seed: Seed, vf: u8| {
        let seed = word(seed.with([9, 0, 1, 8, vf, 0, 5, vf, 0, 0, vf, 4]), vf, 0, 1).with([0, vf, 1, 5, vf, 0]);
        let seed = seed.with([6, vf / 16, 0, 0xff, 0xff, 0, 0, 2, vf, 8, 2, vf, 2]);
        word(seed, vf, 16, 0x8000_0001).with([2, vf, 1, 5, vf, 0, 0, vf, 2, 7, vf / 32, 0, 0xff, 0xff, 0xff, 0xff])
    };
    let one = handshake(Seed::new(), 0);
    let all = (0..63).fold(Seed::new(), handshake);
    let crossing =
        Seed::new().with([9, 0, 1, 0, 5, 4, 2, 5, 8, 2, 5, 16, 2, 5, 24, 0, 5, 5, 0, 5, 0, 2, 5, 9, 5, 5, 0]);
    let resets = one.clone().with([0, 0, 4, 9, 0, 0, 5, 0, 0, 9, 0, 1, 5, 0, 0, 8, 0, 1, 8, 62, 0, 9, 0, 0, 9, 0, 1]);
    [one, all, crossing, resets].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_let_messages_cross() {
        let crossed: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert!(crossed.iter().all(|crossed| *crossed > 0) && crossed[1] >= 3 * 63 / 2, "{crossed:?}");
    }
}
