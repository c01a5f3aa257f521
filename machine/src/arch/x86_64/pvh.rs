//! The PVH start info (`xen/include/public/arch-x86/hvm/start_info.h`).

use super::layout::{ACPI, CMDLINE, MapEntry, PVH_MODULES, ZERO_PAGE};

const MAGIC: u32 = 0x336e_c578;
/// The version with the memory map.
const VERSION: u32 = 1;

/// The start info, which must be at [`super::layout::PVH_START_INFO`].
pub fn start_info(modules: u32, map: &[MapEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in [MAGIC, VERSION, 0, modules] {
        bytes.extend(field.to_le_bytes());
    }
    let modules = if modules == 0 { 0 } else { PVH_MODULES };
    for address in [modules, CMDLINE, ACPI, ZERO_PAGE] {
        bytes.extend(address.to_le_bytes());
    }
    for field in [map.len() as u32, 0] {
        bytes.extend(field.to_le_bytes());
    }
    bytes
}

/// The module list, with the initramfs as its only entry.
pub fn modules(address: u64, len: u64) -> Vec<u8> {
    [address, len, 0, 0].iter().flat_map(|field| field.to_le_bytes()).collect()
}

/// The memory map.
pub fn memory_map(map: &[MapEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in map {
        bytes.extend(entry.range.start.to_le_bytes());
        bytes.extend((entry.range.end - entry.range.start).to_le_bytes());
        bytes.extend((entry.kind as u32).to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::layout::{Layout, PVH_START_INFO};
    use super::*;

    #[test]
    fn the_structures_for_a_pvh_kernel_do_not_overlap() {
        let map = Layout::new(5 << 30, 0, 46).unwrap().memory_map();
        let info = start_info(1, &map);
        assert!(PVH_START_INFO + info.len() as u64 <= PVH_MODULES);
        assert!(PVH_MODULES + modules(0x1000, 0x2000).len() as u64 <= ZERO_PAGE);
        assert_eq!(memory_map(&map).len(), 24 * map.len());
        assert_eq!((info.len(), info[48]), (56, map.len() as u8));
    }

    #[test]
    fn without_an_initramfs_there_is_no_module_list() {
        assert_eq!(start_info(0, &[])[12..24], [0; 12]);
    }
}
