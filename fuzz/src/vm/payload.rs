//! Kernels and firmware: any file is either loaded according to its headers or refused in one line.
//!
//! Tables and files that the VMM itself puts into memory (ACPI and SMBIOS, the initramfs, the command line) are
//! unchanged for any content of the file.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use machine::arch::x86_64::elf::Elf;
use machine::arch::x86_64::layout::{ACPI, CMDLINE, Layout, PVH_MODULES, RSDP_COPY, SMBIOS, ZERO_PAGE};
use machine::arch::x86_64::regs::Entry;
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_devices::GuestMap;
use vm_memory::{Bytes, GuestAddress};
use vmm::config::{PayloadConfig, PlatformConfig, VmConfig, VmPlan};
use vmm::vm::boot::{Payload, Tables};

use crate::input::{Input, Seed};

/// The guest's memory: room for a small kernel and little else.
const MEMORY: u64 = 8 << 20;
const CMDLINE_TEXT: &str = "console=ttyS0";

/// Bits of the first byte.
mod choice {
    /// The file is given as firmware.
    pub(super) const FIRMWARE: u8 = 1;
    /// There is an initramfs.
    pub(super) const INITRAMFS: u8 = 2;
}

/// Result of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The file was refused before anything was loaded.
    Refused,
    /// The file was accepted, but is shorter than its headers say.
    Short,
    /// The file was loaded, with a PVH entry.
    Pvh,
    /// The file was loaded, with a PVH entry, and is firmware.
    Firmware,
    /// The file was loaded, with Linux's 64-bit entry.
    Linux64,
}

fn check_report(error: &impl Display) {
    let text = error.to_string();
    assert!(text.starts_with("--") && !text.contains(char::is_control), "{text:?}");
}

/// An in-memory file, and its path.
fn file(bytes: &[u8]) -> (OwnedFd, PathBuf) {
    let mut file = File::from(memfd_create("payload", MemfdFlags::CLOEXEC).expect("memory for a file"));
    file.write_all(bytes).expect("memory for a file");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    (file.into(), path)
}

/// Loads an input.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

fn run_to_end(input: &[u8]) -> Outcome {
    let mut input = Input::new(input);
    let choices = input.u8();
    let initramfs = input.slice(16);
    let (kernel, path) = file(input.slice(usize::MAX));
    let (_initramfs, initramfs_path) = file(initramfs);
    let is_given_as_firmware = choices & choice::FIRMWARE != 0;
    let has_initramfs = choices & choice::INITRAMFS != 0;
    let config = PayloadConfig {
        kernel: (!is_given_as_firmware).then(|| path.clone()),
        firmware: is_given_as_firmware.then_some(path),
        initramfs: has_initramfs.then_some(initramfs_path),
        cmdline: Some(CMDLINE_TEXT.to_string()),
    };
    let layout = Layout::new(MEMORY, 0, 40).expect("a layout of little memory");
    let payload = match Payload::open(&config, &layout) {
        Ok(payload) => payload,
        Err(error) => {
            check_report(&error);
            return Outcome::Refused;
        }
    };
    let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).expect("guest memory");
    let (acpi, smbios) = (acpi(), smbios());
    let entry = match payload.load(&memory, &layout, &Tables { acpi: &acpi, smbios: &smbios, mp: None }) {
        Ok(entry) => entry,
        Err(error) => {
            check_report(&error);
            return Outcome::Short;
        }
    };
    let read = |address: u64, len: usize| {
        let mut bytes = vec![0; len];
        memory.read_slice(&mut bytes, GuestAddress(address)).expect("an address in guest memory");
        bytes
    };
    assert_eq!(read(ACPI, acpi.len()), acpi);
    assert_eq!(read(RSDP_COPY, 36), acpi[..36]);
    assert_eq!(read(SMBIOS, smbios.len()), smbios);
    let cmdline = if is_given_as_firmware { "" } else { CMDLINE_TEXT };
    assert_eq!(read(CMDLINE, cmdline.len() + 1), [cmdline.as_bytes(), &[0]].concat());
    if has_initramfs && !is_given_as_firmware {
        let number = |address: u64, len: usize| {
            let bytes = read(address, len);
            bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let (address, len) = match entry {
            Entry::Pvh(_) => (number(PVH_MODULES, 8), number(PVH_MODULES + 8, 8)),
            Entry::Linux64(_) => (number(ZERO_PAGE + 0x218, 4), number(ZERO_PAGE + 0x21c, 4)),
        };
        assert_eq!(len, initramfs.len() as u64);
        assert_eq!(read(address, initramfs.len()), initramfs);
    }
    match entry {
        Entry::Linux64(_) => {
            assert!(!payload.is_firmware());
            Outcome::Linux64
        }
        Entry::Pvh(_) => {
            let elf = Elf::parse(&File::from(kernel)).ok().flatten().expect("what was loaded is an ELF file");
            assert!(elf.end <= MEMORY && elf.segments.iter().all(|segment| segment.address >= 1 << 20), "{elf:?}");
            assert!(payload.is_firmware() || !is_given_as_firmware);
            if payload.is_firmware() { Outcome::Firmware } else { Outcome::Pvh }
        }
    }
}

/// Stand-in for ACPI tables.
fn acpi() -> Vec<u8> {
    b"RSD PTR ".iter().copied().chain(8..=255).collect()
}

/// The SMBIOS tables of a VM with an OEM string.
fn smbios() -> Vec<u8> {
    let platform = PlatformConfig { oem_strings: vec!["one".to_string()], ..PlatformConfig::default() };
    VmPlan::of(&VmConfig { platform: Some(platform), ..VmConfig::default() }).expect("a plan of a plain VM").smbios
}

/// An ELF file for `machine` with a segment at `address` and a PVH note.
fn elf(machine: u16, address: u64) -> Vec<u8> {
    let (headers, code) = (64 + 2 * 56, 20);
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(64, 0);
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    (bytes[32], bytes[54], bytes[56]) = (64, 56, 2);
    for (kind, offset, len, memory) in [(4u64, headers, 20, 0), (1, headers + code, 16, 0x1000)] {
        for field in [kind, offset, 0, address, len, memory, 0] {
            bytes.extend(field.to_le_bytes());
        }
    }
    for field in [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), address as u32] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend([0xf4; 16]);
    bytes
}

/// A 32-bit ELF file with a segment at 2 MiB and a PVH note.
fn elf_32() -> Vec<u8> {
    let headers = 52 + 2 * 32;
    let mut bytes = b"\x7fELF\x01\x01\x01".to_vec();
    bytes.resize(52, 0);
    (bytes[18], bytes[28], bytes[42], bytes[44]) = (3, 52, 32, 2);
    for (kind, offset, len, memory) in [(4u32, headers, 20, 0), (1, headers + 20, 16, 0x1000)] {
        for field in [kind, offset, 0, 0x20_0000, len, memory, 0, 0] {
            bytes.extend(field.to_le_bytes());
        }
    }
    for field in [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), 0x20_0000] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend([0xf4; 16]);
    bytes
}

/// A bzImage of the oldest supported protocol, with 4 setup sectors.
fn bzimage() -> Vec<u8> {
    let mut bytes = vec![0; 5 * 512 + 64];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0x1f1, &[4]);
    put(0x201, &[0x6a]);
    put(0x202, b"HdrS");
    put(0x206, &0x20cu16.to_le_bytes());
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(0x234, &[1]);
    put(0x236, &1u16.to_le_bytes());
    put(0x238, &2047u32.to_le_bytes());
    put(0x258, &0x10_0000u64.to_le_bytes());
    put(0x260, &0x1_0000u32.to_le_bytes());
    bytes
}

/// Seeds: kernels of both kinds with and without an initramfs, firmware given both ways, and files that are too short.
pub fn seeds() -> Vec<Vec<u8>> {
    let seed = |choices: u8, file: &[u8]| Seed::new().with([choices]).with([7; 16]).with(file).done();
    let (kernel, firmware) = (elf(62, 0x20_0000), elf(3, 0x10_0000));
    vec![
        seed(0, &kernel),
        seed(choice::INITRAMFS, &kernel),
        seed(0, &bzimage()),
        seed(choice::INITRAMFS, &bzimage()),
        seed(0, &firmware),
        seed(choice::FIRMWARE | choice::INITRAMFS, &firmware),
        seed(choice::FIRMWARE, &kernel),
        seed(0, &kernel[..kernel.len() - 8]),
        seed(choice::FIRMWARE, &bzimage()),
        seed(0, &elf(62, MEMORY)),
        seed(choice::INITRAMFS, &elf_32()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_loaded_or_refused() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        use Outcome::{Firmware, Linux64, Pvh, Refused};
        assert_eq!(done, [Pvh, Pvh, Linux64, Linux64, Firmware, Firmware, Firmware, Refused, Refused, Refused, Pvh]);
    }
}
