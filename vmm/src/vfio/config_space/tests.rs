//! A device with shown, owned and hidden registers, and accesses of all kinds to it.

use pci::spec::{capability_id, extended_capability_id, sriov};
use proptest::prelude::*;

use super::*;

/// A device's own configuration space: MSI-X, PCI Express, power, MSI and a vendor's capability; then SR-IOV, AER, ATS,
/// a vendor's, and a serial number.
fn image() -> Vec<u8> {
    let mut image = vec![0; 0x1000];
    let mut put = |offset: usize, bytes: &[u8]| image[offset..offset + bytes.len()].copy_from_slice(bytes);
    let header = |id: u8, next: u8, rest: u16| [id, next, rest.to_le_bytes()[0], rest.to_le_bytes()[1]];
    put(0x00, &0x10c9_8086_u32.to_le_bytes());
    put(0x04, &0x0010_0407_u32.to_le_bytes());
    put(0x08, &[1, 0, 0, 2, 0x10, 0, 0x80, 0]);
    // A 32-bit BAR, an I/O BAR, and one of 64 bits; a ROM, and an interrupt pin.
    put(0x10, &[0, 0, 0, 0xfe, 1, 0xe0, 0, 0, 0x0c, 0, 0, 0]);
    put(0x2c, &0xa03c_8086_u32.to_le_bytes());
    put(0x30, &[0xff; 4]);
    put(0x34, &[0x70]);
    put(0x3c, &[11, 1, 2, 3]);
    put(0x70, &header(capability_id::MSIX, 0xa0, 9));
    put(0x74, &[2, 0, 0, 0, 2, 0x20, 0, 0]);
    put(0xa0, &header(capability_id::PCI_EXPRESS, 0x40, 0x0002));
    put(0xa4, &0x1000_8fe2_u32.to_le_bytes());
    put(0xa8, &[0xff; 0x34]);
    put(0x40, &header(capability_id::POWER_MANAGEMENT, 0xe0, 0xc823));
    put(0x48, &[0x77; 8]);
    put(0xe0, &header(capability_id::VENDOR, 0x50, 0x000c));
    put(0xe4, &[0x55; 8]);
    put(0x50, &header(capability_id::MSI, 0x68, 0x0188));
    // Resizable or not, an unknown capability is hidden.
    put(0x68, &header(0x14, 0, 0xffff));
    let extended = |id: u16, next: u32| (u32::from(id) | 1 << 16 | next << 20).to_le_bytes();
    put(0x100, &extended(extended_capability_id::SRIOV, 0x150));
    put(0x104, &[0xee; 0x3c]);
    put(0x150, &extended(extended_capability_id::AER, 0x200));
    put(0x154, &[0x66; 0x28]);
    put(0x200, &extended(0x000f, 0x210));
    put(0x204, &[0x22; 8]);
    put(0x210, &extended(extended_capability_id::VENDOR, 0x240));
    // A length that exceeds the room for it.
    put(0x214, &0x0ff0_0001_u32.to_le_bytes());
    put(0x218, &[0x33; 0x28]);
    put(0x240, &extended(extended_capability_id::SERIAL_NUMBER, 0));
    put(0x244, &[0x12; 8]);
    put(0x300, &[0x99; 16]);
    image
}

const SIZES: [u64; 6] = [0x2_0000, 0x20, 0x4000, 0, 0, 0];

fn space() -> ConfigSpace {
    ConfigSpace::new(&image(), SIZES, true, None).unwrap()
}

/// A guest's read, with the host's bits from its image.
fn read(space: &ConfigSpace, image: &[u8], offset: u16) -> u32 {
    let (own, of_host) = space.read(Dword::containing(offset), |_| false);
    let at = usize::from(offset);
    own | u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) & of_host
}

/// B24: the SR-IOV capability of the device is hidden.
#[test]
fn capability_chains_show_only_allowed_ones_at_their_offsets() {
    let (space, image) = (space(), image());
    let mut found = Vec::new();
    let mut at = read(&space, &image, header::CAPABILITIES);
    while at != 0 {
        let value = read(&space, &image, at.try_into().unwrap());
        found.push((at, value & 0xff));
        at = value >> 8 & 0xff;
    }
    assert_eq!(found, [(0x70, 0x11), (0xa0, 0x10), (0x40, 1), (0xe0, 9), (0x50, 5)]);
    let (mut found, mut at) = (Vec::new(), 0x100);
    while at != 0 {
        let value = read(&space, &image, at);
        found.push((at, value & 0xf_ffff));
        at = u16::try_from(value >> 20).unwrap();
    }
    assert_eq!(found, [(0x100, 0), (0x150, 0x1_0001), (0x210, 0x1_000b), (0x240, 0x1_0003)]);
    for offset in (0x104..0x140).chain(0x200..0x210).chain(0x300..0x310).chain(0x68..0x6c).step_by(4) {
        assert_eq!(read(&space, &image, offset), 0, "{offset:#x}");
    }
    assert_eq!(read(&space, &image, 0x218), 0x3333_3333);
    assert_eq!(read(&space, &image, 0x244), 0x1212_1212, "it is not the vendor's");
    let _ = sriov::LEN;
}

#[test]
fn the_header_is_a_single_function_without_pin_rom_and_io() {
    let (mut space, image) = (space(), image());
    let all =
        |space: &ConfigSpace| [0, 8, 0xc, 0x10, 0x14, 0x18, 0x1c, 0x2c, 0x30, 0x3c].map(|at| read(space, &image, at));
    assert_eq!(all(&space), [0x10c9_8086, 0x0200_0001, 0, 0, 0, 0xc, 0, 0xa03c_8086, 0, 0]);
    for offset in (0..0x40).step_by(4) {
        let _ = space.write(Dword::containing(offset), DwordWrite::full(u32::MAX));
    }
    assert_eq!(
        all(&space),
        [0x10c9_8086, 0x0200_0001, 0xff, 0xfffe_0000, 0, 0xffff_c00c, 0xffff_ffff, 0xa03c_8086, 0, 0]
    );
    assert_eq!(read(&space, &image, 4), 0x0010_0546, "no I/O");
}

#[test]
fn pci_express_is_an_integrated_endpoint_without_a_link() {
    let (space, image) = (space(), image());
    let all: Vec<_> = (0xa0..0xdc).step_by(4).map(|at| read(&space, &image, at)).collect();
    let timeouts = 0x1f;
    assert_eq!(all[..4], [0x0092_4010, 0x1000_8022, 0x003f_79ff, 0]);
    assert_eq!(
        (all[9], all[10], all[4..9].iter().sum::<u32>(), all[11..].iter().sum::<u32>()),
        (timeouts, timeouts, 0, 0)
    );
    let fixed = ConfigSpace::new(&image, SIZES, false, None).unwrap();
    assert_eq!(read(&fixed, &image, 0xa4), 0x8022, "it cannot be reset");
}

#[test]
fn initiate_flr_resets_and_is_not_written() {
    let mut space = space();
    let _ = space.write(Dword::containing(4), DwordWrite::new(6, 0b11));
    let written = space.write(Dword::containing(0xa8), DwordWrite::new(0x8810, 0b11));
    assert!(written.flr && written.through.is_none() && written.effects.windows && written.effects.messages);
    assert_eq!((read(&space, &image(), 4) & 0xffff, space.host_command()), (0, 0x402));
    let written = space.write(Dword::containing(0xa8), DwordWrite::new(0x2810, 0b11));
    let through = written.through.unwrap().writes(0x0009_5900);
    assert!(!written.flr);
    assert_eq!(
        through.iter().map(|write| (write.offset, write.data())).collect::<Vec<_>>(),
        [(0xa8, &[0x10, 0x28][..])]
    );
}

#[test]
fn host_always_decodes_memory_and_follows_guest_bus_mastering() {
    let mut space = space();
    assert_eq!(space.host_command(), 0x402);
    let written = space.write(Dword::containing(4), DwordWrite::new(6, 0b11));
    assert!(written.command && written.effects.windows && written.effects.messages && written.through.is_none());
    assert_eq!(space.host_command(), 0x406);
    let mut windows = Vec::new();
    space.windows(&mut windows);
    assert_eq!(windows.len(), 2);
    // In D3hot the function does neither.
    let written = space.write(Dword::containing(0x44), DwordWrite::new(3, 1));
    assert!(written.command && written.through.is_none());
    windows.clear();
    space.windows(&mut windows);
    assert_eq!((windows.len(), space.host_command(), space.bus_master()), (0, 0x402, false));
}

#[test]
fn pin_is_inta_and_only_interrupt_disable_reaches_the_host() {
    let (mut space, image) = (ConfigSpace::new(&image(), SIZES, true, Some(17)).unwrap(), image());
    assert_eq!(read(&space, &image, 0x3c), 0x111);
    let written = space.write(Dword::containing(0x3c), DwordWrite::full(0xffff_ff2a));
    assert_eq!((written, read(&space, &image, 0x3c)), (Written::default(), 0x12a));
    // Interrupt Status comes from the device.
    let interrupted = |space: &ConfigSpace| space.read(Dword::containing(4), |_| false).1 & 0x8_0000;
    assert_eq!((interrupted(&space), interrupted(&self::space())), (0x8_0000, 0));
    for disable in [0, 0x400] {
        let _ = space.write(Dword::containing(4), DwordWrite::new(0x406 ^ disable, 0b11));
        let written = space.write(Dword::containing(4), DwordWrite::new(6 | disable, 0b11));
        assert!(written.command && written.effects.is_none() && written.through.is_none());
        assert_eq!(space.host_command(), 6 | u16::try_from(disable).unwrap());
    }
    let _ = space.reset(ResetKind::Flr);
    assert_eq!((read(&space, &image, 0x3c), space.host_command()), (0x111, 2));
}

#[test]
fn function_uses_its_pin_while_msi_and_msix_are_disabled() {
    let mut space = ConfigSpace::new(&image(), SIZES, true, Some(17)).unwrap();
    for control in [0x70, 0x50] {
        assert!(space.uses_pin());
        let enabled = if control == 0x70 { 0x8000_0000 } else { 0x1_0000 };
        let written = space.write(Dword::containing(control), DwordWrite::full(enabled));
        assert!(written.effects.messages && !space.uses_pin(), "{control:#x}");
        let written = space.write(Dword::containing(control), DwordWrite::full(0));
        assert!(written.effects.messages);
    }
    assert!(!self::space().uses_pin(), "it has none");
}

#[test]
fn an_error_bit_is_cleared_alone() {
    let mut space = space();
    let through = |space: &mut ConfigSpace, offset, write, old| -> Vec<(u16, Vec<u8>)> {
        let written = space.write(Dword::containing(offset), write);
        let writes = written.through.map(|through| through.writes(old)).unwrap_or_default();
        writes.into_iter().map(|write| (write.offset, write.data().to_vec())).collect()
    };
    let status = DwordWrite::new(0x8000_0000, 0b1100);
    assert_eq!(through(&mut space, 4, status, 0xf910_0000), [(7, vec![0x80])]);
    assert_eq!(through(&mut space, 4, DwordWrite::new(0, 0b1100), 0xf910_0000), []);
    assert_eq!(through(&mut space, 0x160, DwordWrite::full(1), 0xffff_ffff), [(0x160, vec![1, 0, 0, 0])]);
    assert_eq!(through(&mut space, 0xe8, DwordWrite::new(0x7700, 0b0010), 0), [(0xe9, vec![0x77])]);
}

#[test]
fn device_without_interrupts_or_with_bad_tables_is_refused() {
    let mut bare = image();
    bare[0x34] = 0x40;
    bare[0x41] = 0;
    let error = ConfigSpace::new(&bare, SIZES, true, None).unwrap_err().to_string();
    assert_eq!(error, "it has neither MSI-X nor MSI, and no interrupt pin that the host can mask; give another device");
    assert!(ConfigSpace::new(&bare, SIZES, true, Some(17)).is_ok(), "a pin is enough");
    let mut table = image();
    table[0x74] = 7;
    assert!(matches!(ConfigSpace::new(&table, SIZES, true, None), Err(ConfigError::Msix(_))));
    assert!(matches!(ConfigSpace::new(&image(), [3; 6].map(|n| n << 12), true, None), Err(ConfigError::Bars(_))));
}

#[test]
fn arbitrary_device_config_is_accepted_or_an_error() {
    let _ = ConfigSpace::new(&[], [0; 6], true, None);
    let _ = ConfigSpace::new(&[0xff; 0x1000], [u64::MAX; 6], true, None);
    let _ = ConfigSpace::new(&[0x40; 0x1000], [0x1000; 6], true, None);
}

/// True if a guest may change this byte on the host.
fn may_be_written(offset: u16) -> bool {
    let ranges = [
        // Status; Device Control and Status; Device Control 2; the vendor's capability after its length.
        6..8,
        0xa8..0xac,
        0xc8..0xca,
        0xe3..0xec,
        // AER's status, masks, severities and control; the vendor's after its header.
        0x154..0x168,
        0x168..0x16a,
        0x218..0x240,
    ];
    ranges.iter().any(|range| range.contains(&offset))
}

proptest! {
    /// No access writes a hidden host register, or one that this program owns.
    #[test]
    fn no_access_writes_what_is_hidden_or_owned(
        accesses in prop::collection::vec((0_u16..0x1000, any::<u32>(), 1_u8..16, any::<u32>()), 1..200),
        line in any::<Option<u8>>()
    ) {
        let mut space = ConfigSpace::new(&image(), SIZES, true, line).unwrap();
        for (offset, value, enables, old) in accesses {
            let reg = Dword::containing(offset);
            let write = DwordWrite::new(value, enables);
            let written = space.write(reg, write);
            for write in written.through.iter().flat_map(|through| through.writes(old)) {
                let len = u16::try_from(write.data().len()).unwrap();
                prop_assert!([1, 2, 4].contains(&len) && write.offset.is_multiple_of(len));
                for at in write.offset..write.offset + len {
                    prop_assert!(may_be_written(at), "{at:#x}");
                    prop_assert!(enables >> (at & 3) & 1 == 1, "it was not written to");
                }
                prop_assert!(!(write.offset <= 0xa9 && 0xa9 < write.offset + len
                    && write.data()[usize::from(0xa9 - write.offset)] & 0x80 != 0), "Initiate FLR");
            }
            prop_assert_eq!(space.host_command() & !0x546, 0);
            let disabled = line.is_none() || space.command & command::INTERRUPT_DISABLE != 0;
            prop_assert_eq!(space.host_command() & 0x402, if disabled { 0x402 } else { 2 });
            let (pin, of_host) = space.read(Dword::containing(header::INTERRUPT), |_| false);
            prop_assert_eq!((pin >> 8, of_host), (u32::from(line.is_some()), 0));
        }
    }

    /// Random bytes are a device as well: nothing panics, and no dword of the header is passed through.
    #[test]
    fn any_image_can_be_accessed(image in prop::collection::vec(any::<u8>(), 0x1000), value in any::<u32>()) {
        let Ok(mut space) = ConfigSpace::new(&image, SIZES, true, None) else { return Ok(()) };
        for reg in Dword::all() {
            let (own, of_host) = space.read(reg, |_| false);
            prop_assert_eq!(own & of_host, 0);
            let written = space.write(reg, DwordWrite::full(value));
            let writes = written.through.map(|through| through.writes(value));
            let is_status = |offset: u16| (6..8).contains(&offset);
            prop_assert!(writes.into_iter().flatten().all(|write| write.offset >= 0x40 || is_status(write.offset)));
        }
    }
}
