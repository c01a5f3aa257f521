//! Tiny guests: a few instructions in an ELF file with a PVH note.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::error::Error;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use vmm::config::{ConsoleConfig, ConsoleMode, CpusConfig, MemoryConfig, PayloadConfig, PlannedVm, VmConfig};

/// The address where a guest's code is loaded and entered, in flat 32-bit mode.
pub(crate) const CODE: u32 = 0x20_0000;

/// The offset of the code in the ELF file.
pub(crate) const CODE_OFFSET: u64 = 64 + 2 * 56 + 20;
/// The size of the code in the file, so that the files of all guests differ only in their code.
const CODE_LEN: u64 = 1024;

/// A guest's instructions.
#[derive(Default)]
pub(crate) struct Code(pub Vec<u8>);

impl Code {
    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// `mov dx, port; mov al, value; out dx, al`
    pub(crate) fn out(self, port: u16, value: u8) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xb0, value, 0xee])
    }

    /// `mov dx, port; in al, dx`
    pub(crate) fn input(self, port: u16) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xec])
    }

    /// Writes `text` to the serial port.
    pub(crate) fn print(self, text: &str) -> Self {
        text.bytes().fold(self, |code, byte| code.out(0x3f8, byte))
    }

    /// `mov dword [address], value`
    pub(crate) fn store(self, address: u32, value: u32) -> Self {
        self.bytes(&[0xc7, 0x05]).bytes(&address.to_le_bytes()).bytes(&value.to_le_bytes())
    }

    /// `mov eax, [address]`
    pub(crate) fn load(self, address: u32) -> Self {
        self.bytes(&[0xa1]).bytes(&address.to_le_bytes())
    }

    /// Prints `text` if EAX equals `value`.
    pub(crate) fn print_if_eax(self, value: u32, text: &str) -> Self {
        let print = Self::default().print(text).0;
        let skip = u8::try_from(print.len()).unwrap();
        // cmp eax, value; jne past the printing
        self.bytes(&[0x3d]).bytes(&value.to_le_bytes()).bytes(&[0x75, skip]).bytes(&print)
    }

    /// Powers the machine off as the ACPI tables describe: SLP_TYP 5 and SLP_EN.
    pub(crate) fn power_off(self) -> Self {
        self.out(0x600, 5 << 2 | 1 << 5).spin()
    }

    /// `jmp $`
    pub(crate) fn spin(self) -> Self {
        self.bytes(&[0xeb, 0xfe])
    }

    /// `mov dx, port; mov eax, value; out dx, eax`
    pub(crate) fn out32(self, port: u16, value: u32) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xb8]).bytes(&value.to_le_bytes()).bytes(&[0xef])
    }

    /// `mov dx, port; in eax, dx`
    pub(crate) fn input32(self, port: u16) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xed])
    }

    /// As [`Self::elf`], loaded to 1 MiB and for a 32-bit machine, like firmware.
    pub(crate) fn firmware(&self) -> Vec<u8> {
        let mut bytes = self.elf();
        bytes[18] = 3;
        let address = 0x10_0000u64.to_le_bytes();
        // The physical address in the second program header, and the entry in the note.
        bytes[64 + 56 + 24..64 + 56 + 32].copy_from_slice(&address);
        bytes[CODE_OFFSET as usize - 4..CODE_OFFSET as usize].copy_from_slice(&address[..4]);
        bytes
    }

    /// As [`Self::elf`], with a Linux note.
    pub(crate) fn linux(&self) -> Vec<u8> {
        let mut bytes = self.elf();
        let (at, pvh) = (bytes.len() as u64, CODE_OFFSET as usize - 20..CODE_OFFSET as usize);
        bytes.extend_from_within(pvh);
        for field in [6, 4, 0x100, u32::from_le_bytes(*b"Linu"), u32::from_le_bytes(*b"x\0\0\0"), 0] {
            bytes.extend(field.to_le_bytes());
        }
        let len = bytes.len() as u64 - at;
        // The notes' offset and lengths in the first program header.
        for (field, value) in [(8, at), (32, len), (40, len)] {
            bytes[64 + field..64 + field + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// As [`Self::elf`], as a 32-bit file.
    pub(crate) fn elf_32(&self) -> Vec<u8> {
        const HEADERS: u32 = 52 + 2 * 32;
        const NOTE: u32 = 20;
        let mut bytes = b"\x7fELF\x01\x01\x01".to_vec();
        bytes.resize(52, 0);
        (bytes[18], bytes[28], bytes[42], bytes[44]) = (3, 52, 32, 2);
        let len = self.0.len() as u32;
        for (kind, offset, address, len) in [(4, HEADERS, 0, NOTE), (1, HEADERS + NOTE, CODE, len)] {
            for field in [kind, offset, address, address, len, len, 0, 0] {
                bytes.extend(field.to_le_bytes());
            }
        }
        for field in [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), CODE] {
            bytes.extend(field.to_le_bytes());
        }
        [&bytes[..], &self.0].concat()
    }

    /// An ELF file with this code and a PVH entry at its start.
    pub(crate) fn elf(&self) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(64, 0);
        bytes[18] = 62;
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 2;
        let note = CODE_OFFSET - 20;
        for (kind, offset, address, len) in [(4u64, note, 0, 20), (1, CODE_OFFSET, u64::from(CODE), CODE_LEN)] {
            for field in [kind, offset, address, address, len, len, 0] {
                bytes.extend(field.to_le_bytes());
            }
        }
        for field in [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), CODE] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(&self.0);
        assert!(self.0.len() as u64 <= CODE_LEN);
        bytes.resize((CODE_OFFSET + CODE_LEN) as usize, 0);
        bytes
    }
}

/// A guest and its files.
pub(crate) struct Guest {
    directory: TempDir,
    /// The configuration of the VM, whose serial port writes to a file.
    pub config: VmConfig,
}

impl Guest {
    /// A VM with one vCPU and 16 MiB that runs `code`.
    pub(crate) fn new(code: &Code) -> Self {
        Self::with_kernel(&code.elf())
    }

    /// A VM with one vCPU and 16 MiB whose kernel file has these bytes.
    pub(crate) fn with_kernel(bytes: &[u8]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kernel = directory.path().join("kernel");
        std::fs::write(&kernel, bytes).unwrap();
        let serial = Some(directory.path().join("serial"));
        let config = VmConfig {
            memory: MemoryConfig { size: 16 << 20, ..MemoryConfig::default() },
            payload: PayloadConfig { kernel: Some(kernel), ..PayloadConfig::default() },
            serial: ConsoleConfig { file: serial, ..ConsoleConfig::new(ConsoleMode::File) },
            ..VmConfig::default()
        };
        Self { directory, config }
    }

    /// Sets the number of vCPUs.
    pub(crate) fn with_vcpus(mut self, vcpus: u32) -> Self {
        self.config.cpus = CpusConfig { boot_vcpus: vcpus, max_vcpus: vcpus, ..CpusConfig::default() };
        self
    }

    /// The path of a file in the guest's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs the guest until it ends. Earlier output is removed.
    pub(crate) fn run(&self) -> Result<(), Box<dyn Error>> {
        self.config.payload.check_present()?;
        let _ = std::fs::remove_file(self.path("serial"));
        Ok(vmm::run(vmm::Options {
            vm: Some(PlannedVm::new(self.config.clone())?),
            seccomp: vmm::Seccomp::False,
            ..vmm::Options::default()
        })?)
    }

    /// Output of the guest's serial port so far.
    pub(crate) fn output(&self) -> String {
        output(&self.path("serial"))
    }
}

/// Output of a serial port in a file so far.
pub(crate) fn output(path: &Path) -> String {
    String::from_utf8(std::fs::read(path).unwrap_or_default()).unwrap()
}

/// Waits until the guest has written `text`.
pub(crate) fn wait_for(path: &Path, text: &str) {
    let start = std::time::Instant::now();
    while !output(path).contains(text) {
        assert!(start.elapsed().as_secs() < 60, "{text:?} is not in {:?}", output(path));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
