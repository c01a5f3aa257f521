//! Seeds of this target.

use super::{COMMAND, CONFIG, MMIO_WRITE, REBOOT, REFUSE, REGISTERS, RESET, SRIOV};
use crate::input::Seed;

fn config(seed: Seed, device: u8, function: u8, offset: u16, value: u32) -> Seed {
    let register = REGISTERS.iter().position(|register| *register == offset).unwrap_or(usize::from(offset));
    seed.with([CONFIG, device, function, register as u8, 2]).with(value.to_le_bytes())
}

/// Enables VFs with the BARs at their present addresses.
fn enable(seed: Seed, device: u8, num_vfs: u32) -> Seed {
    let seed = config(seed, device, 0, COMMAND, 6);
    config(config(seed, device, 0, SRIOV + 0x10, num_vfs), device, 0, SRIOV + 8, 9)
}

/// Seeds: VFs of both PFs, BARs that move onto each other and away, D3hot, a driver that starts, and a VM that
/// refuses calls.
pub fn seeds() -> Vec<Vec<u8>> {
    let placed = || Seed::new().with([1]);
    let both = || enable(enable(placed(), 0, 5), 1, 2);
    let moved = [(0x2c, 0x4000_0000), (0x30, 1), (0x34, 0x4000_4000), (0x38, 1)];
    let moved = moved.into_iter().fold(both(), |seed, (offset, value)| config(seed, 0, 0, SRIOV + offset, value));
    let moved = config(config(moved, 1, 0, 0x18, 0x4000_1000), 1, 0, 0x1c, 1);
    let end = config(config(both(), 2, 0, COMMAND, 2), 2, 0, 0x1c, u32::MAX);
    let end = config(end, 2, 0, 0x18, u32::MAX);
    let page = config(enable(config(placed(), 0, 0, SRIOV + 0x20, 0x10), 0, 5), 0, 0, SRIOV + 8, 0);
    let asleep = config(both(), 0, 0, 0x8c, 3);
    // The plain NIC: MSI-X, vector 0 for configuration changes, DRIVER_OK. The first window is BAR 2, the second BAR
    // 4.
    let write = |seed: Seed, window: u8, offset: u16, len: u8, value: u64| {
        seed.with([MMIO_WRITE, 2, window]).with(offset.to_le_bytes()).with([len]).with(value.to_le_bytes())
    };
    let driver = config(config(placed(), 2, 0, COMMAND, 6), 2, 0, 0x7c, 0x8000_0000);
    let driver = write(write(write(driver, 1, 0, 4, 0xfee0_0000), 1, 8, 4, 0x41), 1, 12, 4, 0);
    let features = [(0x14, 1, 1), (0x14, 1, 3), (0x08, 4, 1), (0x0c, 4, 1), (0x14, 1, 11), (0x10, 2, 0), (0x14, 1, 15)];
    let driver = || features.into_iter().fold(driver.clone(), |seed, (at, len, value)| write(seed, 0, at, len, value));
    let masked = config(driver(), 2, 0, 0x7c, 0xc000_0000);
    let refused = enable(driver().with([REFUSE, 0, 1]), 0, 4).with([REFUSE, 0, 0]);
    let rebooted = driver().with([REBOOT, 0]);
    [both(), moved, end, page, asleep, driver(), masked, refused, rebooted, both().with([RESET, 0])]
        .map(Seed::done)
        .into()
}

#[cfg(test)]
mod tests {
    use super::super::run_to_end;
    use super::*;

    #[test]
    fn seeds_decode_and_send() {
        let ends: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let both = (8, 0, 9);
        let driven = [(2, 1, 1), (2, 0, 1), (6, 1, 1), (0, 0, 0)];
        assert_eq!(ends, [&[both, both, (9, 0, 10), (2, 0, 1), (4, 0, 9)], &driven[..], &[(4, 0, 4)]].concat());
    }
}
