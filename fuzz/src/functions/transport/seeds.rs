//! Seeds of this target.

use super::pair::{
    BAR_READ, BAR_WRITE, COMMON, CONFIG_READ, CONFIG_WRITE, MSIX_BAR, Pair, REFUSE, REGISTERS_BAR, RESET, RESTORE,
    TAMPER, WINDOW_READ, WINDOW_WRITE,
};
use super::rules::{COMMON_REGISTERS, VECTORS};
use crate::input::Seed;

fn common(seed: Seed, register: u8, value: u32) -> Seed {
    let n = COMMON_REGISTERS.iter().position(|(offset, _)| *offset == u64::from(register)).unwrap_or(0);
    seed.with([COMMON, n as u8]).with(value.to_le_bytes())
}

fn config(seed: Seed, offset: u16, len: u8, value: u32) -> Seed {
    seed.with([CONFIG_WRITE]).with(offset.to_le_bytes()).with([len]).with(value.to_le_bytes())
}

/// Bus Master, MSI-X with all vectors, ACKNOWLEDGE to FEATURES_OK, and a vector for configuration changes.
fn negotiate() -> Seed {
    let pair = Pair::new();
    let mut seed = config(Seed::new(), 4, 2, 6);
    seed = config(seed, pair.msix as u16 + 2, 2, 0x8000);
    for vector in 0..VECTORS {
        for (offset, value) in [(0, 0xfee0_0000), (8, 0x40 + u32::from(vector)), (12, 0)] {
            let at = u32::from(vector) * 16 + offset;
            seed =
                seed.with([BAR_WRITE, MSIX_BAR]).with(at.to_le_bytes()).with([4]).with(u64::from(value).to_le_bytes());
        }
    }
    for (register, value) in [(0x14, 1), (0x14, 3), (0x08, 1), (0x0c, 1), (0x08, 0), (0x0c, 32), (0x14, 11), (0x10, 0)]
    {
        seed = common(seed, register, value);
    }
    seed
}

fn queue(seed: Seed, index: u16, size: u16, addresses: [u64; 3]) -> Seed {
    let seed = common(common(seed, 0x16, index.into()), 0x18, size.into());
    let mut seed = common(seed, 0x1a, u32::from(index) + 1);
    for (register, address) in (0x20..).step_by(8).zip(addresses) {
        seed = common(common(seed, register, address as u32), register + 4, (address >> 32) as u32);
    }
    common(seed, 0x1c, 1)
}

/// A restore with three modifications.
fn tampered(seed: Seed, changes: [(u8, u8, u16); 3]) -> Seed {
    let seed = seed.with([TAMPER, 2]);
    changes.into_iter().fold(seed, |seed, (what, n, value)| seed.with([what, n]).with(value.to_le_bytes()))
}

/// Seeds: a driver that starts, through memory and through the PCI configuration access capability; invalid queues;
/// resets of each kind; a start that fails; D3hot and back; and restores in each of these states.
pub fn seeds() -> Vec<Vec<u8>> {
    let pair = Pair::new();
    let driver_ok = |seed| common(seed, 0x14, 15);
    let queues = |seed| queue(queue(seed, 0, 128, [0x1000, 0x2000, 0x3000]), 1, 1, [0x4000, 0x5000, 0x6000]);
    let up = || driver_ok(queues(negotiate()));
    let nonsense = queue(queue(negotiate(), 2, 32_768, [!15, !1, !3]), 0, 256, [8, 1, 2]);
    let window = |seed: Seed, offset: u16, len: u8, value: u32| {
        seed.with([WINDOW_WRITE, REGISTERS_BAR]).with(offset.to_le_bytes()).with([len]).with(value.to_le_bytes())
    };
    let by_window = [(0x14, 1, 1), (0x14, 1, 3), (0x08, 4, 1), (0x0c, 4, 1), (0x14, 1, 11), (0x14, 1, 15)];
    let by_window =
        by_window.into_iter().fold(config(Seed::new(), 4, 2, 6), |seed, (at, len, value)| window(seed, at, len, value));
    let by_window = by_window.with([WINDOW_READ, REGISTERS_BAR, 0, 1, 1]);
    let d3 = config(config(up(), pair.power as u16 + 4, 2, 3), pair.power as u16 + 4, 2, 0);
    let read_isr = [BAR_READ, REGISTERS_BAR, 0, 1, 0, 0, 1];
    let read_pba = [BAR_READ, MSIX_BAR, 0, 8, 0, 0, 8];
    let masked = config(queues(negotiate()).with([REFUSE, 1]), pair.msix as u16 + 2, 2, 0xc000);
    let unmasked = config(driver_ok(masked).with(read_isr).with(read_pba), pair.msix as u16 + 2, 2, 0x8000);
    let refused = unmasked.clone().with(read_pba);
    vec![
        up().with(read_isr).done(),
        driver_ok(nonsense).done(),
        by_window.done(),
        refused.done(),
        d3.done(),
        common(up(), 0x14, 0).done(),
        config(up(), pair.pcie as u16 + 8, 2, 0x8000).done(),
        up().with([RESET]).done(),
        common(driver_ok(common(queues(negotiate()).with([REFUSE, 1]), 0x10, 0xffff)), 0x14, 0).with(read_isr).done(),
        common(up(), 0x14, 128).done(),
        up().with([BAR_WRITE, REGISTERS_BAR, 0, 0x10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0])
            .with([CONFIG_READ, 0, 0, 4])
            .done(),
        common(up().with([RESTORE]), 0x10, 0xffff).with([RESTORE]).with(read_pba).done(),
        unmasked.with([RESTORE]).with(read_isr).done(),
        tampered(up(), [(4, 1, 0), (11, 0, 0), (0, 0, 11)]).done(),
        tampered(tampered(up(), [(13, 0, 7), (2, 0, 0), (14, 0, 2)]), [(8, 0, 1), (12, 0, 1), (3, 0, 64)]).done(),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::rules::{FAILED, NEEDS_RESET};
    use super::super::run_to_end;
    use super::*;

    #[test]
    fn seeds_bring_up_the_driver_and_take_it_down_in_each_way() {
        let ends: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let down = (0, false, 0);
        let up = (15, true, 3);
        let refused = (15 | NEEDS_RESET, false, 3);
        let failed = (15 | FAILED, false, 3);
        let restored = [up, refused, up, up];
        let plain = [up, (15, true, 3), (15, true, 0), refused, up, down, down, down, down, failed, up];
        assert_eq!(ends, [&plain[..], &restored].concat());
    }
}
