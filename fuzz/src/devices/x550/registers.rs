//! BAR 0 of the PF and of its VFs, accesses of any width at any offset, with resets, events and saved states between.
//!
//! The oracle: a read returns what a peek showed, and a peek changes nothing; messages are for vectors that the
//! function has; what the data path asks for is within its limits; a VF changes nothing but its own; what is saved is
//! restored, and what cannot be is refused without a change.

use std::sync::OnceLock;

use x550::{Counter, Direction, Effects, Model, Nic, NicState, Place, VfCounter, rows};

use super::{MAC, choice, place};
use crate::input::{Input, Seed};

/// Flag of an offset that is the number of a register.
const NUMBERED: u32 = 1 << 31;

/// Offsets of registers of both BARs, an element or two of each array.
fn offsets() -> &'static [u32] {
    static OFFSETS: OnceLock<Vec<u32>> = OnceLock::new();
    OFFSETS.get_or_init(|| {
        let stored = rows().flat_map(|row| [row.first, row.first + (row.count - 1) * row.stride]);
        let others =
            [0x0, 0x8, 0x10, 0x600, 0x1c0, 0x700, 0x704, 0x710, 0x71c, 0x800, 0x808, 0x810, 0x880, 0x888, 0x890];
        let more = [0xa90, 0xa94, 0xaa0, 0xaa4, 0xab0, 0xab4, 0xad0, 0xad4, 0x2f04, 0x4984, 0x425c, 0x4260, 0x4b00];
        let last = [0x10140, 0x13000, 0x13f7c, 0x15800, 0x15804, 0x15808, 0x15f00, 0x15f0c, 0xee38];
        let vf = [
            0x100, 0x104, 0x108, 0x10c, 0x110, 0x114, 0x120, 0x140, 0x200, 0x23c, 0x2fc, 0x300, 0x3000, 0x3100, 0x3200,
        ];
        stored.chain(others).chain(more).chain(last).chain(vf).collect()
    })
}

fn offset(input: &mut Input<'_>) -> u64 {
    let raw = input.u32();
    if raw & NUMBERED == 0 {
        return (raw & 0xf_ffff).into();
    }
    let all = offsets();
    u64::from(all[raw as usize % 0x10000 % all.len()]) + u64::from(raw >> 28 & 7) % 5 / 4
}

/// Numbers of what happened.
#[derive(Debug, Default, PartialEq, Eq)]
struct Done {
    writes: usize,
    vectors: usize,
    restored: usize,
    refused: usize,
}

/// Runs the accesses of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

fn run_to_end(input: &[u8]) -> (Nic, Done) {
    let mut input = Input::new(input);
    let model = if input.u8() & 1 == 0 { Model::X550 } else { Model::X540 };
    let (mut nic, mut done) = (Nic::with_model(model, MAC), Done::default());
    while !input.is_empty() {
        let effects = step(&mut nic, &mut input, &mut done);
        for (place, vectors) in &effects.vectors {
            done.vectors += 1;
            assert!(*vectors != 0, "{effects:?}");
            match place {
                Place::Pf => {}
                Place::Vf(index) => assert!(*index < 63 && *vectors < 8, "{effects:?}"),
            }
        }
        assert!(effects.doorbell.is_none_or(|bell| bell.queue < 128), "{effects:?}");
    }
    check_values(&nic);
    let state = nic.save();
    done.restored += usize::from(round_trip(&mut nic, &state, true));
    (nic, done)
}

fn step(nic: &mut Nic, input: &mut Input<'_>, done: &mut Done) -> Effects {
    let [operation, at] = input.array();
    match operation % 16 {
        0..=4 => {
            done.writes += 1;
            let (offset, value) = (offset(input), input.u32());
            nic.write(place(at), offset, &value.to_le_bytes())
        }
        5 => {
            done.writes += 1;
            let (offset, value) = (offset(input), input.u64());
            nic.write(place(at), offset, &value.to_le_bytes()[..usize::from(at) % 9])
        }
        6 | 7 => {
            let (offset, len) = (offset(input), usize::from(input.u8()) % 9);
            let (mut peeked, mut read) = ([0xaa; 8], [0x55; 8]);
            nic.peek(place(at), offset, &mut peeked[..len]);
            nic.read(place(at), offset, &mut read[..len]);
            assert_eq!(peeked[..len], read[..len], "{offset:#x}");
            Effects::NONE
        }
        8 => nic.queue_event(direction(at), input.u8().into()),
        9 => nic.set_num_vfs(at.into()),
        10 => nic.set_link(at & 1 == 1),
        11 => nic.reset_vf(at.into()),
        12 if at == 0 => nic.reset(),
        12 => {
            nic.set_head(direction(at), u16::from(at / 2), input.u16());
            nic.count(Counter::BytesReceived, input.u64());
            nic.count_vf(at.into(), VfCounter::BytesSent, 1 << (at % 64));
            Effects::NONE
        }
        13 => checked_write(nic, at, input),
        14 => {
            let before = nic.save();
            let mut peeked = [0; 64];
            nic.peek(place(at), offset(input), &mut peeked);
            assert!(nic.save() == before, "a peek changes nothing");
            Effects::NONE
        }
        _ => {
            let state = changed_state(nic.save(), at, input);
            let restored = round_trip(nic, &state, false);
            done.restored += usize::from(restored);
            done.refused += usize::from(!restored);
            Effects::NONE
        }
    }
}

fn direction(choice: u8) -> Direction {
    if choice & 1 == 0 { Direction::Receive } else { Direction::Transmit }
}

/// A write of a VF, which changes nothing but what is its own and the causes of the PF.
fn checked_write(nic: &mut Nic, at: u8, input: &mut Input<'_>) -> Effects {
    let index = u16::from(at) % 63;
    let (offset, value) = (offset(input) % 0x4000, input.u32());
    let before = nic.save();
    let effects = nic.write(Place::Vf(index), offset, &value.to_le_bytes());
    let after = nic.save();
    let mode = before.registers.iter().find(|(at, _)| *at == 0x11050).map_or(0, |(_, value)| value & 3);
    let per_pool = [0, 8, 4, 2][mode as usize];
    let own = u32::from(index) * per_pool..u32::from(index + 1) * per_pool;
    let changed = before.registers.iter().filter(|register| !after.registers.contains(register));
    let changed = changed.chain(after.registers.iter().filter(|register| !before.registers.contains(register)));
    for (offset, _) in changed {
        let is_own = match *offset {
            0x1000..0x2000 => own.contains(&((offset - 0x1000) / 0x40)),
            0xd000..0xe000 => own.contains(&(64 + (offset - 0xd000) / 0x40)),
            0x6000..0x8000 => own.contains(&((offset - 0x6000) / 0x40)),
            0xea00..0xeb00 | 0x3400..0x3500 => offset % 0x100 / 4 == u32::from(index),
            0x1_8000..0x1_a000 => offset / 0x40 % 64 == u32::from(index),
            _ => false,
        };
        assert!(is_own, "VF {index} changed {offset:#x}");
    }
    for (other, (before, after)) in before.vfs.iter().zip(&after.vfs).enumerate() {
        assert!(other == usize::from(index) || before == after, "VF {index} changed VF {other}");
    }
    let rest =
        |state: NicState| (state.phy, state.firmware, state.semaphore, state.in_reset, state.queues, state.rules);
    let is_kept = before.vectors == after.vectors && rest(before) == rest(after);
    assert!(is_kept, "VF {index} at {offset:#x}");
    effects
}

/// A saved state with a change from the input.
fn changed_state(mut state: NicState, at: u8, input: &mut Input<'_>) -> NicState {
    let register = (offset(input) as u32, input.u32());
    match at % 8 {
        0 => {}
        1 => state.registers.push(register),
        2 => state.registers.insert(0, register),
        3 => state.vectors[usize::from(at / 8) % 4] ^= input.u64(),
        4 => state.other[usize::from(at / 8) % 4] ^= register.1,
        5 => state.rules.push([register.0, register.1, 0, 0, 0, 0]),
        6 => state.queues.push((input.u16(), register.0, register.1)),
        _ => state.vfs[usize::from(at / 8)].vectors[0] ^= input.u64(),
    }
    state
}

/// Restores a state. Returns false if it was refused, without a change; `valid` states are not.
fn round_trip(nic: &mut Nic, state: &NicState, valid: bool) -> bool {
    let before = nic.clone();
    match nic.restore(state) {
        Ok(()) => assert!(nic.save() == *state, "restored as another state"),
        Err(error) => {
            assert!(!valid, "{error}");
            assert!(*nic == before, "refused, and changed: {error}");
            return false;
        }
    }
    assert!(!valid || *nic == before);
    true
}

/// Limits of the values for the data path.
fn check_values(nic: &Nic) {
    let pools = nic.switching().pools;
    for index in 0..64 {
        let pool = nic.pool(index);
        assert!(pool.addresses.len() <= 128 && pool.queues.start <= pool.queues.end && pool.queues.end <= 128);
        assert!(!pool.receives || index < pools);
        let steered = nic.rss(index).queue_of(&[0x45; 90]);
        assert_eq!(steered.queue, 0, "not IP");
    }
    for queue in 0..128 {
        assert!(nic.receive_queue(queue).available() < 0x1_0000 && nic.transmit_queue(queue).available() < 0x1_0000);
    }
    assert!(nic.flow_rules() <= 2048);
}

/// Seeds: what drivers write at probe, for VFs, and at a reset.
pub fn seeds() -> Vec<Vec<u8>> {
    let writes = |seed: Seed, of: Place, writes: &[(u32, u32)]| {
        writes.iter().fold(seed, |seed, (offset, value)| {
            seed.with([0, choice(of)]).with(offset.to_le_bytes()).with(value.to_le_bytes())
        })
    };
    let up = [(0x18, 1 << 14), (0x898, 1 << 30), (0xa00, 0x8200), (0x900, 0x8180), (0x880, 3 << 19), (0x3000, 1)];
    let pools = [(0x11050, 2), (0x51b0, 1), (0x51e0, 0xf), (0x8110, 0xf), (0x5818, 0xf3_200a), (0xf000, 0x0f00_0000)];
    let queue = [(0x1000, 0x8000), (0x1008, 0x200), (0x1028, 1 << 25), (0x1018, 7), (0x2000, 0x8000), (0x2018, 1)];
    let vf = [(0x108, 7), (0x140, 0x82), (0x120, 0x8180), (0x2fc, 4), (0x200, 1), (0x2fc, 1), (0x3000, 0xf3_0001)];
    [0, 1]
        .into_iter()
        .flat_map(|model| {
            let alone = writes(Seed::new().with([model, 10, 1]), Place::Pf, &up);
            let seed = writes(alone.clone().with([9, 4]), Place::Pf, &pools);
            let seed = writes(writes(seed, Place::Vf(2), &vf), Place::Vf(2), &queue);
            let checked = vf.iter().chain(&queue).fold(seed.clone(), |seed, (offset, value): &(u32, u32)| {
                seed.with([13, 2]).with(offset.to_le_bytes()).with(value.to_le_bytes())
            });
            let lengths = [4, 4, 4, 12, 4, 4, 6, 12];
            let saved = (0u8..).zip(lengths).fold(seed.clone(), |seed, (at, len)| {
                seed.with([15, at]).with([0x18, 0, 0, 0]).with(&[0x81; 12][..len])
            });
            let resets = writes(seed.clone().with([8, 0, 8, 11, 2]), Place::Pf, &[(0, 1 << 26)]).with([12, 0]);
            let reads = [0x800u32, 0x10140, 0x2fc, 0xee38, 0x13000].into_iter().fold(seed, |seed, offset| {
                seed.with([6, 0]).with(offset.to_le_bytes()).with([4, 14, 129]).with(offset.to_le_bytes())
            });
            [alone, checked, saved, resets, reads].map(Seed::done)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_write_registers_send_messages_and_restore() {
        let (nics, done): (Vec<_>, Vec<_>) = seeds().iter().map(|seed| run_to_end(seed)).unzip();
        assert!(done.iter().all(|done| done.writes >= 6 && done.restored > 0), "{done:?}");
        let total = |of: fn(&Done) -> usize| done.iter().map(of).sum::<usize>();
        assert!(total(|done| done.vectors) >= 4 && total(|done| done.refused) >= 4, "{done:?}");
        assert!(nics.iter().any(|nic| nic.receive_queue(8).enabled && nic.pool(2).receives));
        assert!(nics.iter().any(|nic| nic.model() == Model::X540));
    }

    #[test]
    fn an_offset_is_raw_or_the_number_of_a_register() {
        let of = |raw: u32| offset(&mut Input::new(&raw.to_le_bytes()));
        assert_eq!((of(0x5404), of(NUMBERED)), (0x5404, u64::from(offsets()[0])));
        assert!(offsets().len() > 300);
    }
}
