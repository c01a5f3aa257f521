//! Tiny guests, written by hand, that are saved and go on in another machine of this process.

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pci::Bdf;
use tempfile::TempDir;
use virtio_devices::GuestRegion;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryBackend as _, GuestMemoryRegion as _};

use crate::arch::x86_64::layout::ECAM;
use crate::config::{PlannedVm, VmConfig};
use crate::exits::MmioHandler as _;
use crate::machine_state::MachineState;
use crate::machine_state::error::RestoreError;
use crate::telemetry::events::Events;
use crate::vm::Vm;
use crate::vm::host_limits::HostLimits;

/// Makes a VM of files that a VM before it had. A child process of another test may have a copy of a descriptor, and so
/// of a lock, for a moment.
fn once_free<E: std::fmt::Display + std::fmt::Debug>(make: impl Fn() -> Result<Vm, E>) -> Vm {
    let start = Instant::now();
    loop {
        match make() {
            Err(error) if start.elapsed() < Duration::from_secs(60) && error.to_string().contains("in use") => {
                std::thread::sleep(Duration::from_millis(20));
            }
            made => return made.unwrap(),
        }
    }
}

/// Address at which code is loaded and starts, in flat 32-bit mode.
pub(super) const CODE: u64 = 0x20_0000;
/// Address of guests' counter.
pub(super) const COUNT: u64 = 0x30_0000;
/// Address at which guests note a mistake.
pub(super) const MISTAKE: u64 = COUNT + 4;
/// Address of the flag that guests wait for.
pub(super) const GO: u64 = COUNT + 8;

/// A machine, and what it was made of.
pub(in crate::vm) struct Machine {
    pub vm: Vm,
    planned: PlannedVm,
    _folder: Option<Arc<TempDir>>,
}

impl Machine {
    /// A machine with `code` and what `json` has beside that, which runs.
    pub(in crate::vm) fn boot(code: &[u8], json: &str) -> Self {
        let mut machine = Self::new(code, json);
        machine.vm.power_on().unwrap();
        machine
    }

    /// The same, which is not powered on.
    pub(in crate::vm) fn new(code: &[u8], json: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        std::fs::File::create(&path).unwrap().write_all(&elf(code)).unwrap();
        let mut config: VmConfig = serde_json::from_str(json).unwrap();
        match &mut config.payload.firmware {
            Some(firmware) => *firmware = path,
            None => config.payload.kernel = Some(path),
        }
        if config.memory.zones.is_empty() && config.memory.size == 512 << 20 {
            config.memory.size = 8 << 20;
        }
        let planned = PlannedVm::new(config).unwrap();
        let limits = HostLimits::default();
        let vm = once_free(|| Vm::new(planned.config(), planned.plan(), Events::default(), limits, None));
        Self { vm, planned, _folder: Some(Arc::new(folder)) }
    }

    /// The state as the bytes that it is saved as.
    pub(super) fn save(&self) -> Vec<u8> {
        serde_json::to_vec(&self.vm.save_machine().unwrap()).unwrap()
    }

    /// A machine of the same configuration with the same memory, in this state.
    pub(super) fn restored(&self, bytes: &[u8]) -> Self {
        self.try_restored(&serde_json::from_slice(bytes).unwrap()).unwrap()
    }

    pub(super) fn try_restored(&self, state: &MachineState) -> Result<Self, RestoreError> {
        let (planned, limits) = (self.planned.clone(), HostLimits::default());
        let mut vm = Vm::for_restore(planned.config(), planned.plan(), state, Events::default(), limits, None)?;
        let (from, to) = (self.vm.ram.memory().memory(), vm.ram.memory().memory());
        for (from, to) in from.iter().zip(to.iter()) {
            to.write_slice(&bytes_of(from), vm_memory::MemoryRegionAddress(0)).unwrap();
        }
        vm.restore_machine(state)?;
        Ok(Self { vm, planned, _folder: None })
    }

    /// The machine that takes the place of this one, which is paused, in the state that was saved.
    pub(super) fn moved_paused(&self, bytes: &[u8]) -> Self {
        Self { _folder: self._folder.clone(), ..self.restored(bytes) }
    }

    /// Moves it to where it can only be once this one has ended, and lets it go on.
    pub(super) fn moved_away(mut self) -> Self {
        self.vm.pause();
        let before = self.save();
        let memory = self.vm.ram.memory().memory();
        let contents: Vec<_> = memory.iter().map(bytes_of).collect();
        let Self { vm, planned, _folder } = self;
        drop((memory, vm));
        let state: MachineState = serde_json::from_slice(&before).unwrap();
        let limits = HostLimits::default();
        let vm =
            once_free(|| Vm::for_restore(planned.config(), planned.plan(), &state, Events::default(), limits, None));
        let mut after = Self { vm, planned, _folder };
        for (bytes, to) in contents.iter().zip(after.vm.ram.memory().memory().iter()) {
            to.write_slice(bytes, vm_memory::MemoryRegionAddress(0)).unwrap();
        }
        after.vm.restore_machine(&state).unwrap();
        assert_same(&after.save(), &before);
        after.vm.resume().unwrap();
        after
    }

    pub(super) fn planned(&self) -> &PlannedVm {
        &self.planned
    }

    /// It is of this configuration now.
    pub(super) fn plan(&mut self, config: VmConfig) {
        self.planned = PlannedVm::new(config).unwrap();
    }

    /// Pauses it, moves it, compares the states of before and after, and lets it go on.
    pub(super) fn moved(mut self) -> Self {
        self.vm.pause();
        let before = self.save();
        let mut after = self.restored(&before);
        assert_same(&after.save(), &before);
        after._folder = self._folder.take();
        after.vm.resume().unwrap();
        after
    }

    pub(super) fn read(&self, address: u64) -> u32 {
        self.vm.ram.memory().memory().read_obj(GuestAddress(address)).unwrap()
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        self.vm.ram.memory().memory().write_slice(bytes, GuestAddress(address)).unwrap();
    }

    /// Waits until the guest has counted beyond `count`.
    pub(super) fn counts_beyond(&self, count: u32) {
        let start = Instant::now();
        while self.read(COUNT) <= count {
            assert!(start.elapsed() < Duration::from_secs(30), "the guest stands at {}", self.read(COUNT));
            std::thread::sleep(Duration::from_micros(200));
        }
        assert_eq!(self.read(MISTAKE), 0, "the guest has found a mistake");
    }

    /// Address of the device `id`.
    pub(super) fn address(&self, id: &str) -> Bdf {
        self.vm.devices.find(id).unwrap().address()
    }

    /// Writes to configuration space, as a guest does.
    pub(super) fn config_write(&self, function: u16, offset: u64, data: &[u8]) {
        self.vm.devices.bus().write(ECAM.start + (u64::from(function) << 12) + offset, data);
    }

    pub(super) fn config_read(&self, function: u16, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.vm.devices.bus().read(ECAM.start + (u64::from(function) << 12) + offset, &mut data);
        u32::from_le_bytes(data)
    }
}

fn bytes_of(region: &GuestRegion) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(region.len()).unwrap()];
    region.read_slice(&mut bytes, vm_memory::MemoryRegionAddress(0)).unwrap();
    bytes
}

/// Two states are the same bytes.
#[track_caller]
pub(super) fn assert_same(one: &[u8], other: &[u8]) {
    let differs = one.iter().zip(other).position(|(a, b)| a != b);
    let at = differs.unwrap_or(one.len().min(other.len()));
    let part =
        |bytes: &[u8]| String::from_utf8_lossy(&bytes[at.saturating_sub(60)..bytes.len().min(at + 60)]).into_owned();
    assert!(one == other, "they differ from byte {at} on:\n{}\n{}", part(one), part(other));
}

/// A kernel with a PVH entry at its beginning, which counts as Linux by its second note.
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    let note = [4u32, 8, 18].map(u32::to_le_bytes).concat().into_iter().chain(*b"Xen\0").chain(CODE.to_le_bytes());
    let linux = [6u32, 0, 0x100].map(u32::to_le_bytes).concat().into_iter().chain(*b"Linux\0\0\0");
    let note: Vec<u8> = note.chain(linux).collect();
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(64, 0);
    bytes[18..20].copy_from_slice(&62u16.to_le_bytes());
    bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
    bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
    bytes[56..58].copy_from_slice(&2u16.to_le_bytes());
    let (at, len) = (64 + 2 * 56, code.len() as u64);
    for (kind, offset, len, memory) in [(1u32, at, len, len), (4, at + len, note.len() as u64, 0)] {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        [offset, CODE, CODE, len, memory, 0].into_iter().for_each(|field| bytes.extend(field.to_le_bytes()));
    }
    bytes.extend(code);
    bytes.extend(note);
    bytes
}
