//! The initial registers of vCPUs, and the memory contents that they refer to.

use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use super::layout::{GDT, PAGE_TABLES, PVH_START_INFO, RESET_PORT, RESET_VALUE, ZERO_PAGE};

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of RFLAGS, which is always 1.
const FLAGS: u64 = 2;

const MSR_MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs are enabled, and memory is write-back by default.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// The boot protocol, with the entry point's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// In 32-bit mode without paging: the PVH protocol (`xen/docs/misc/pvh.pandoc`).
    Pvh(u32),
    /// In 64-bit mode with the first 4 GiB mapped: the Linux protocol (`Documentation/arch/x86/boot.rst`, 64-bit).
    Linux64(u64),
}

impl Entry {
    /// The general registers at entry.
    pub fn regs(self) -> kvm_regs {
        match self {
            Self::Pvh(rip) => kvm_regs { rip: rip.into(), rbx: PVH_START_INFO, rflags: FLAGS, ..Default::default() },
            Self::Linux64(rip) => kvm_regs { rip, rsi: ZERO_PAGE, rflags: FLAGS, ..Default::default() },
        }
    }

    /// Changes the segment and control registers from their power-on values to those at entry.
    pub fn set_sregs(self, sregs: &mut kvm_sregs) {
        sregs.cr0 = CR0_PE | CR0_ET;
        if let Self::Linux64(_) = self {
            sregs.cr0 |= CR0_PG;
            sregs.cr3 = PAGE_TABLES;
            sregs.cr4 |= CR4_PAE;
            sregs.efer |= EFER_LME | EFER_LMA;
        }
        let descriptors = self.descriptors();
        let segment = |selector| segment(&descriptors, selector);
        sregs.cs = segment(CODE);
        [sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss] = [segment(DATA); 5];
        sregs.tr = segment(TASK);
        sregs.gdt = kvm_dtable { base: GDT, limit: (8 * descriptors.len() - 1) as u16, ..Default::default() };
        // No IDT: an exception before the kernel has its own is a triple fault, as on hardware.
        sregs.idt = kvm_dtable::default();
    }

    /// The global descriptor table, which must be at [`GDT`].
    pub fn descriptors(self) -> [u64; 5] {
        let code = match self {
            Self::Pvh(_) => 0x00cf_9b00_0000_ffff,
            Self::Linux64(_) => 0x00af_9b00_0000_ffff,
        };
        // The Linux protocol prescribes the selectors of code and data. Only the first half of the task's descriptor is
        // needed.
        [0, 0, code, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067]
    }
}

const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

/// The segment register of a loaded descriptor (Intel SDM, volume 3A, 3.4.5).
fn segment(descriptors: &[u64], selector: u16) -> kvm_segment {
    let descriptor = descriptors[usize::from(selector / 8)];
    let bits = |shift: u32, width: u32| (descriptor >> shift & ((1 << width) - 1)) as u8;
    let limit = (descriptor & 0xffff | descriptor >> 32 & 0xf_0000) as u32;
    let granularity = bits(55, 1);
    kvm_segment {
        base: descriptor >> 16 & 0xff_ffff | descriptor >> 32 & 0xff00_0000,
        limit: if granularity == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        type_: bits(40, 4),
        s: bits(44, 1),
        dpl: bits(45, 2),
        present: bits(47, 1),
        avl: bits(52, 1),
        l: bits(53, 1),
        db: bits(54, 1),
        g: granularity,
        unusable: 0,
        padding: 0,
    }
}

/// The firmware, which must be at [`super::layout::RESET_VECTOR`]: it only resets the machine.
///
/// To reboot a hardware-reduced machine without EFI, Linux jumps there instead of using the ACPI reset register.
pub fn firmware() -> [u8; 9] {
    let [low, high] = RESET_PORT.to_le_bytes();
    // mov dx, RESET_PORT; mov al, RESET_VALUE; out dx, al; hlt; jmp back to hlt
    [0xba, low, high, 0xb0, RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
}

/// The page tables of a 64-bit entry, which must be at [`PAGE_TABLES`]: an identity map of the first 4 GiB with 2 MiB
/// pages.
pub fn page_tables() -> Vec<u8> {
    const TABLE: u64 = 4096;
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let table = |entries: &mut dyn Iterator<Item = u64>| {
        let mut bytes: Vec<u8> = entries.flat_map(u64::to_le_bytes).collect();
        bytes.resize(TABLE as usize, 0);
        bytes
    };
    let mut bytes = table(&mut [(PAGE_TABLES + TABLE) | PRESENT_WRITABLE].into_iter());
    bytes.extend(table(&mut (2..6).map(|n| (PAGE_TABLES + n * TABLE) | PRESENT_WRITABLE)));
    bytes.extend((0..4 * 512).flat_map(|n: u64| (n << 21 | LARGE | PRESENT_WRITABLE).to_le_bytes()));
    bytes
}

/// The model-specific registers that firmware changes on every vCPU.
///
/// Never `None`: the list is short.
pub fn msrs() -> Option<Msrs> {
    let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    Msrs::from_entries(&[msr(MSR_MISC_ENABLE, FAST_STRINGS), msr(MSR_MTRR_DEF_TYPE, MTRR_WRITE_BACK)]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sregs(entry: Entry) -> kvm_sregs {
        let mut sregs = kvm_sregs::default();
        entry.set_sregs(&mut sregs);
        sregs
    }

    #[test]
    fn pvh_starts_in_flat_32_bit_mode_without_paging() {
        let entry = Entry::Pvh(0x100_0000);
        let sregs = sregs(entry);
        assert_eq!((sregs.cr0, sregs.cr4, sregs.efer), (0x11, 0, 0));
        assert_eq!((sregs.cs.base, sregs.cs.limit, sregs.cs.type_, sregs.cs.db, sregs.cs.l), (0, u32::MAX, 0xb, 1, 0));
        assert_eq!((sregs.ss.base, sregs.ss.limit, sregs.ss.type_, sregs.ss.db), (0, u32::MAX, 3, 1));
        assert_eq!((sregs.tr.limit, sregs.tr.type_, sregs.tr.s, sregs.tr.present), (0x67, 0xb, 0, 1));
        let regs = entry.regs();
        assert_eq!((regs.rip, regs.rbx, regs.rflags), (0x100_0000, PVH_START_INFO, 2));
    }

    #[test]
    fn linux_starts_in_64_bit_mode_with_the_protocols_selectors() {
        let entry = Entry::Linux64(0x100_0200);
        let sregs = sregs(entry);
        assert_eq!((sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer), (0x8000_0011, PAGE_TABLES, 0x20, 0x500));
        assert_eq!((sregs.cs.selector, sregs.cs.l, sregs.cs.db, sregs.ds.selector), (0x10, 1, 0, 0x18));
        assert_eq!((entry.regs().rip, entry.regs().rsi), (0x100_0200, ZERO_PAGE));
    }

    #[test]
    fn the_page_tables_map_4_gib_one_to_one() {
        let bytes = page_tables();
        assert_eq!(bytes.len(), 6 * 4096);
        assert!(PAGE_TABLES + bytes.len() as u64 <= super::super::layout::CMDLINE);
        let entry = |at: u64| {
            let at = (at - PAGE_TABLES) as usize;
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        for address in [0u64, 0x1234_5678, 0xffff_f000] {
            let table = |entry: u64| entry & !0xfff;
            let directories = table(entry(PAGE_TABLES));
            let directory = table(entry(directories + 8 * (address >> 30)));
            let page = entry(directory + 8 * (address >> 21 & 0x1ff));
            assert_eq!((page & !0xfff, page & 0xfff), (address & !0x1f_ffff, 0x83));
        }
    }
}
