//! State of a vCPU.
//!
//! The order of KVM's ioctls matters: some change what others return.

use std::ops::RangeInclusive;

use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::{kvm_regs, kvm_sregs};
use serde::{Deserialize, Serialize};

use crate::arch::x86_64::hyperv;
use crate::kvm::{Abilities, KvmError, RefusedMsr, Vcpu};
use crate::machine_state::blob::Blob;
use crate::machine_state::compatibility::Incompatible;
use crate::machine_state::error::RestoreError;

/// Deadline of the local APIC's timer, in absolute TSC ticks.
const TSC_DEADLINE: u32 = 0x6e0;
/// Registers without state of their own: the time stamp counter, which is set through its offset, and Hyper-V's clock
/// and run time, which follow from KVM's clock.
const FOLLOW: [u32; 3] = [0x10, 0x4000_0020, 0x4000_0010];
/// Registers that KVM supports and does not list: MTRRs and machine-check banks. Zeros are left out, because they are
/// the reset state.
const UNLISTED: [RangeInclusive<u32>; 6] =
    [0x2ff..=0x2ff, 0x250..=0x250, 0x258..=0x259, 0x268..=0x26f, 0x200..=0x20f, 0x400..=0x47f];
/// Controls of nested virtualization (IA32_FEAT_CTL and IA32_VMX_*). KVM checks nested guests against them, and refuses
/// to set them once the guest is in VMX operation.
const BEFORE_NESTED: [RangeInclusive<u32>; 2] = [0x3a..=0x3a, 0x480..=0x491];
/// Limit on the registers of a state. KVM lists about 200.
const MAX_MSRS: usize = 2048;

/// State of a stopped vCPU without a pending access.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// Number of the vCPU.
    pub id: u8,
    /// State: running, halted or waiting to be started (`KVM_MP_STATE_*`).
    pub mp_state: u32,
    /// The general registers (`struct kvm_regs`).
    pub regs: Blob,
    /// The segment and control registers (`struct kvm_sregs`).
    pub sregs: Blob,
    /// Page-directory pointers, with 32-bit PAE paging.
    pub pdptrs: Option<[u64; 4]>,
    /// The XSAVE area.
    pub xsave: Blob,
    /// Extended control registers (`struct kvm_xcrs`), if the CPU has any.
    pub xcrs: Option<Blob>,
    /// The debug registers (`struct kvm_debugregs`).
    pub debug: Blob,
    /// The local APIC (`struct kvm_lapic_state`).
    pub lapic: Blob,
    /// Offset of the time stamp counter from the first vCPU's; 0 unless the guest has set it.
    pub tsc_ahead: u64,
    /// The model-specific registers: index and value.
    pub msrs: Vec<(u32, u64)>,
    /// State of nested guests (`struct kvm_nested_state`).
    pub nested: Option<Blob>,
    /// Pending exceptions and interrupts (`struct kvm_vcpu_events`).
    pub events: Blob,
}

/// State that is saved and restored for each vCPU of a machine.
#[derive(Debug)]
pub(crate) struct Extent {
    /// State that this host supports.
    pub abilities: Abilities,
    /// Model-specific registers, in the order of setting.
    msrs: Vec<u32>,
}

impl Extent {
    /// Creates the extent from `indices`, KVM's list, which lacks some registers of Hyper-V. A guest without that
    /// interface cannot set these.
    pub(crate) fn new(abilities: Abilities, indices: &[u32], has_hyperv: bool) -> Self {
        let is_own = |index: &u32| !FOLLOW.contains(index) && !UNLISTED.iter().any(|range| range.contains(index));
        let mut msrs: Vec<_> = indices.iter().copied().filter(is_own).collect();
        if has_hyperv {
            msrs.extend(hyperv::msrs().filter(|index| !indices.contains(index)));
        }
        msrs.sort_by_key(|index| turn(*index));
        Self { abilities, msrs }
    }
}

/// Rank of a model-specific register in the order of setting.
fn turn(index: u32) -> usize {
    match hyperv::place(index) {
        // Last: writing the deadline starts the timer with the values of the other registers.
        None if index == TSC_DEADLINE => usize::MAX,
        None => 0,
        Some(place) => 1 + place,
    }
}

impl VcpuState {
    /// Saves `vcpu`. `first_offset` is the TSC offset of the first vCPU.
    ///
    /// # Errors
    ///
    /// Fails if an ioctl fails.
    pub(crate) fn save(vcpu: &Vcpu, id: u8, first_offset: u64, extent: &Extent) -> Result<Self, KvmError> {
        let Extent { abilities, msrs } = extent;
        // Before the local APIC: this read may accept an INIT or SIPI that is pending there.
        let mp_state = vcpu.mp_state()?;
        let regs = Blob::of(&vcpu.regs()?);
        let sregs = Blob::of(&vcpu.sregs()?);
        let pdptrs = if abilities.pdptrs { vcpu.pdptrs()? } else { None };
        let xsave = Blob::new(vcpu.xsave(abilities)?);
        let xcrs = if abilities.xcrs { Some(Blob::of(&vcpu.xcrs()?)) } else { None };
        let debug = Blob::of(&vcpu.debug_registers()?);
        let lapic = Blob::of(&vcpu.lapic()?);
        let tsc_ahead = vcpu.tsc_offset()?.wrapping_sub(first_offset);
        let unlisted: Vec<_> = UNLISTED.into_iter().flatten().collect();
        let mut values = vcpu.msrs(&unlisted)?;
        values.retain(|(_, value)| *value != 0);
        values.extend(vcpu.msrs(msrs)?);
        let msrs = values;
        let nested = if abilities.nested { Some(cut(&vcpu.nested_state()?)) } else { None };
        // Last: other reads may change what is pending.
        let events = Blob::of(&vcpu.events()?);
        Ok(Self { id, mp_state, regs, sregs, pdptrs, xsave, xcrs, debug, lapic, tsc_ahead, msrs, nested, events })
    }

    /// Restores `vcpu`, which has its CPUID and TSC frequency and has never run. `first_offset` is the TSC offset of
    /// the first vCPU.
    ///
    /// # Errors
    ///
    /// Fails if the state does not fit the vCPU, or KVM rejects it.
    pub(crate) fn restore(&self, vcpu: &Vcpu, first_offset: u64, extent: &Extent) -> Result<(), RestoreError> {
        let abilities = &extent.abilities;
        // The offset first: deadlines are in TSC ticks.
        self.told(vcpu.set_tsc_offset(first_offset.wrapping_add(self.tsc_ahead)))?;
        self.told(vcpu.set_mp_state(self.mp_state))?;
        self.told(vcpu.set_regs(&part::<kvm_regs>(&self.regs, "a vCPU's registers")?))?;
        let sregs: kvm_sregs = part(&self.sregs, "a vCPU's system registers")?;
        match self.pdptrs {
            Some(pdptrs) if abilities.pdptrs => self.told(vcpu.set_sregs_with_pdptrs(&sregs, pdptrs))?,
            _ => self.told(vcpu.set_sregs(&sregs))?,
        }
        self.restore_vectors(vcpu, abilities)?;
        self.told(vcpu.set_debug_registers(&part(&self.debug, "a vCPU's debug registers")?))?;
        self.told(vcpu.set_lapic(&part(&self.lapic, "a vCPU's local APIC")?))?;
        let [before, after] = self.msrs_around_nested()?;
        self.restore_msrs(vcpu, &before)?;
        match &self.nested {
            Some(nested) if abilities.nested => self.told(vcpu.set_nested_state(&whole(nested)?))?,
            Some(_) => return Err(RestoreError::Value("a guest's guests, which this host does not have")),
            None => {}
        }
        self.restore_msrs(vcpu, &after)?;
        self.told(vcpu.set_events(&part(&self.events, "a vCPU's events")?))
    }

    fn told<T>(&self, result: Result<T, KvmError>) -> Result<T, RestoreError> {
        result.map_err(|error| RestoreError::Vcpu { vcpu: self.id.into(), error })
    }

    fn restore_vectors(&self, vcpu: &Vcpu, abilities: &Abilities) -> Result<(), RestoreError> {
        let (guest, host) = (self.xsave.bytes().len(), abilities.xsave);
        // State beyond the host's XSAVE area must be zero.
        let is_used = |byte: &u8| *byte != 0;
        let fits = self.xsave.bytes().get(host..).is_none_or(|rest| !rest.iter().any(is_used));
        if !fits {
            return Err(Incompatible::Xsave { guest, host }.into());
        }
        let bytes = self.xsave.bytes().get(..guest.min(host)).unwrap_or_default();
        self.told(vcpu.set_xsave(bytes, abilities))?;
        match &self.xcrs {
            Some(xcrs) if abilities.xcrs => {
                self.told(vcpu.set_xcrs(&part(xcrs, "a vCPU's extended control registers")?))
            }
            Some(_) => Err(RestoreError::Value("extended control registers, which this host does not have")),
            None => Ok(()),
        }
    }

    /// Splits the registers into those to set before the nested state, and those to set after it, in order.
    fn msrs_around_nested(&self) -> Result<[Vec<(u32, u64)>; 2], RestoreError> {
        if self.msrs.len() > MAX_MSRS || self.msrs.iter().any(|(index, _)| FOLLOW.contains(index)) {
            return Err(RestoreError::Value("a vCPU's model-specific registers"));
        }
        let is_before = |(index, _): &(u32, u64)| BEFORE_NESTED.iter().any(|range| range.contains(index));
        let (before, mut after): (Vec<_>, Vec<_>) = self.msrs.iter().copied().partition(is_before);
        // In the order of a save, whatever the order in the state.
        after.sort_by_key(|(index, _)| turn(*index));
        Ok([before, after])
    }

    fn restore_msrs(&self, vcpu: &Vcpu, msrs: &[(u32, u64)]) -> Result<(), RestoreError> {
        match self.told(vcpu.set_each_msr(msrs))? {
            None => Ok(()),
            Some(RefusedMsr { index, value }) => Err(Incompatible::Msr { index, value }.into()),
        }
    }
}

fn part<T: zerocopy::FromBytes>(blob: &Blob, what: &'static str) -> Result<T, RestoreError> {
    blob.read().ok_or(RestoreError::Value(what))
}

/// Cuts the unused end off nested state.
fn cut(state: &KvmNestedStateBuffer) -> Blob {
    let whole = Blob::of(state);
    let len = usize::try_from(state.size).unwrap_or(usize::MAX).min(whole.bytes().len());
    Blob::new(whole.bytes().get(..len).unwrap_or_default().to_vec())
}

/// Restores the full length of nested state.
fn whole(blob: &Blob) -> Result<KvmNestedStateBuffer, RestoreError> {
    const WHAT: &str = "a guest's guests";
    let room = size_of::<KvmNestedStateBuffer>();
    let mut bytes = blob.bytes().to_vec();
    if bytes.len() > room {
        return Err(RestoreError::Value(WHAT));
    }
    let len = bytes.len();
    bytes.resize(room, 0);
    let state: KvmNestedStateBuffer = Blob::new(bytes).read().ok_or(RestoreError::Value(WHAT))?;
    // KVM reads `size` bytes.
    if usize::try_from(state.size).is_ok_and(|size| size == len) { Ok(state) } else { Err(RestoreError::Value(WHAT)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine_state::MachineState;

    #[test]
    fn nested_feature_msrs_are_set_first_and_the_deadline_last() {
        let golden = include_str!("../vm/saved/golden/machine_state-1.json");
        let state: MachineState = serde_json::from_str(golden).unwrap();
        let mut vcpu = state.vcpus.into_iter().next().unwrap();
        let numbered = |indices: &[u32]| indices.iter().map(|index| (*index, u64::from(*index))).collect::<Vec<_>>();
        vcpu.msrs = numbered(&[0x6e0, 0x174, 0x491, 0x3a, 0x492, 0x480, 0x47f, 0x3b, 0x48b]);
        let [before, after] = vcpu.msrs_around_nested().unwrap();
        assert_eq!(before, numbered(&[0x491, 0x3a, 0x480, 0x48b]));
        assert_eq!(after, numbered(&[0x174, 0x492, 0x47f, 0x3b, 0x6e0]));
        vcpu.msrs.push((0x10, 0));
        assert!(vcpu.msrs_around_nested().is_err(), "the counter is set by its offset");
    }

    /// Excerpt of the list of Linux 6.1's KVM, with all registers of Hyper-V in it.
    const LISTED: [u32; 17] = [
        0x174,
        0x4000_0000,
        0x4000_0001,
        0x4000_0020,
        0x4000_0021,
        0x4000_0022,
        0x4000_0023,
        0x4000_0105,
        0x4000_0003,
        0x4000_0002,
        0x4000_0010,
        0x4000_0080,
        0x4000_00b0,
        0x4000_0073,
        0x4000_0106,
        0x6e0,
        0x277,
    ];

    #[test]
    fn hyperv_registers_that_kvm_does_not_list_are_saved_too() {
        let abilities =
            Abilities { xsave: 4096, xcrs: true, pdptrs: true, nested: true, tsc_scaling: true, realtime: true };
        let saved = |has_hyperv| Extent::new(abilities, &LISTED, has_hyperv).msrs;
        let others = [0x174, 0x4000_0022, 0x4000_0023, 0x4000_0105, 0x4000_0003, 0x4000_0106, 0x277];
        let own: Vec<_> = hyperv::msrs().collect();
        assert_eq!(saved(true), [&others[..], &own, &[0x6e0]].concat());
        let listed: Vec<_> = own.into_iter().filter(|index| LISTED.contains(index)).collect();
        assert_eq!(saved(false), [&others[..], &listed, &[0x6e0]].concat());
    }

    #[test]
    fn hyperv_registers_are_set_in_their_order_however_saved() {
        let golden = include_str!("../vm/saved/golden/machine_state-1.json");
        let state: MachineState = serde_json::from_str(golden).unwrap();
        let mut vcpu = state.vcpus.into_iter().next().unwrap();
        let mut saved: Vec<_> = hyperv::msrs().chain([0x6e0, 0x174]).map(|index| (index, 1)).collect();
        saved.reverse();
        vcpu.msrs = saved;
        let [before, after] = vcpu.msrs_around_nested().unwrap();
        assert_eq!(before, []);
        let expected: Vec<_> = [0x174].into_iter().chain(hyperv::msrs()).chain([0x6e0]).collect();
        assert_eq!(after.into_iter().map(|(index, _)| index).collect::<Vec<_>>(), expected);
    }
}
