//! The vCPU hot-plug registers: a state machine, without interrupts and threads.
//!
//! A vCPU is present, or can be added. An added vCPU is present at once, and the guest is notified. A vCPU that should
//! be removed stays present until the guest ejects it, or replies that it keeps it. vCPU 0 is never removed.
//!
//! The registers are I/O ports, used only by the AML of `acpi/processors.rs`. Each register has 32 ports and a bit for
//! each vCPU: vCPU n is bit `n % 8` of port `n / 8`.
//!
//! | offset | read | written |
//! |---|---|---|
//! | 0 | vCPUs that are present | nothing |
//! | 32 | vCPUs that were added; reading a port clears its bits | nothing |
//! | 64 | vCPUs that should be removed; reading a port clears its bits | nothing |
//! | 96 | 0 | vCPUs that the guest ejects |
//! | 128 | 0 | vCPUs that should be removed, but that the guest keeps |
//!
//! Writes affect only the guest itself: it can eject present vCPUs other than vCPU 0, and keep those that it was asked
//! to release.

use crate::acpi::event_state::VcpuHotplugState;

/// Number of ports.
pub const PORTS: u16 = 5 * REGISTER;
/// Offset of the register of present vCPUs.
pub const PRESENT: u16 = 0;
/// Offset of the register of added vCPUs.
pub const ADDED: u16 = REGISTER;
/// Offset of the register of vCPUs to be removed.
pub const LEAVING: u16 = 2 * REGISTER;
/// Offset of the register with which the guest ejects vCPUs.
pub const EJECT: u16 = 3 * REGISTER;
/// Offset of the register with which the guest keeps vCPUs.
pub const KEEP: u16 = 4 * REGISTER;

/// Number of ports of a register.
const REGISTER: u16 = 32;

/// A set of vCPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Set([u8; REGISTER as usize]);

impl FromIterator<u8> for Set {
    fn from_iter<I: IntoIterator<Item = u8>>(ids: I) -> Self {
        let mut set = Self::default();
        ids.into_iter().for_each(|id| set.insert(id));
        set
    }
}

impl Set {
    /// The first `count` vCPUs.
    fn first(count: u8) -> Self {
        let mut set = Self::default();
        (0..count).for_each(|id| set.insert(id));
        set
    }

    fn contains(&self, id: u8) -> bool {
        self.byte(u16::from(id / 8)) >> (id % 8) & 1 != 0
    }

    fn insert(&mut self, id: u8) {
        if let Some(byte) = self.0.get_mut(usize::from(id / 8)) {
            *byte |= 1 << (id % 8);
        }
    }

    fn remove(&mut self, id: u8) {
        if let Some(byte) = self.0.get_mut(usize::from(id / 8)) {
            *byte &= !(1 << (id % 8));
        }
    }

    fn byte(&self, n: u16) -> u8 {
        self.0.get(usize::from(n)).copied().unwrap_or(0)
    }

    fn take_byte(&mut self, n: u16) -> u8 {
        self.0.get_mut(usize::from(n)).map_or(0, std::mem::take)
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; REGISTER as usize]
    }

    fn iter(self) -> impl DoubleEndedIterator<Item = u8> {
        (0..=u8::MAX).filter(move |id| self.contains(*id))
    }

    fn len(&self) -> usize {
        self.iter().count()
    }
}

/// Next step towards a requested number of vCPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// None: the number is reached, or the guest was asked to release vCPUs.
    Asked,
    /// Create these vCPUs, and then pass each to [`VcpuHotplug::add`].
    Add(Vec<u8>),
    /// Impossible until the guest replies if it releases this vCPU.
    Unanswered(u8),
}

/// The state of all vCPUs, and the notifications between guest and VMM that are pending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VcpuHotplug {
    /// The maximum number of vCPUs; IDs are below it.
    max: u8,
    present: Set,
    /// Added; not read by the guest yet.
    added: Set,
    /// To be removed; not read by the guest yet.
    asked: Set,
    /// To be removed; without the guest's reply yet.
    leaving: Set,
    /// Ejected by the guest; not handled by the VMM yet.
    ejected: Set,
}

impl VcpuHotplug {
    /// vCPUs 0 to `present` - 1 of at most `max`, and nothing to report.
    pub fn new(present: u8, max: u8) -> Self {
        Self { max, present: Set::first(present.min(max)), ..Self::default() }
    }

    /// Asks the guest to release the vCPUs with the highest numbers if it should have fewer, or returns the ones to
    /// add. Does neither before the guest has replied to an earlier request.
    pub fn resize(&mut self, vcpus: u8) -> Change {
        if let Some(first) = self.leaving.iter().next() {
            return Change::Unanswered(first);
        }
        let wanted = usize::from(vcpus);
        if let Some(surplus) = self.present().checked_sub(wanted) {
            let going: Vec<u8> = self.present.iter().rev().take(surplus).filter(|id| *id != 0).collect();
            going.into_iter().for_each(|id| self.leaving.insert(id));
            self.asked = self.leaving;
            return Change::Asked;
        }
        let free = (0..self.max).filter(|id| !self.present.contains(*id));
        let new: Vec<u8> = free.take(wanted - self.present()).collect();
        match new.iter().find(|id| self.ejected.contains(**id)) {
            // The machine still runs it.
            Some(id) => Change::Unanswered(*id),
            None => Change::Add(new),
        }
    }

    /// Adds vCPU `id`.
    pub fn add(&mut self, id: u8) {
        self.present.insert(id);
        self.added.insert(id);
    }

    /// True if the guest has an event to be notified of.
    pub fn has_news(&self) -> bool {
        !(self.added.is_empty() && self.asked.is_empty())
    }

    /// Number of vCPUs that are present.
    pub fn present(&self) -> usize {
        self.present.len()
    }

    /// The vCPUs that the guest has ejected since the last call.
    pub fn take_ejected(&mut self) -> impl Iterator<Item = u8> + use<> {
        std::mem::take(&mut self.ejected).iter()
    }

    /// Reads the port at `offset`; 0 after the registers.
    pub fn read(&mut self, offset: u16) -> u8 {
        match offset {
            PRESENT..ADDED => self.present.byte(offset),
            ADDED..LEAVING => self.added.take_byte(offset - ADDED),
            LEAVING..EJECT => self.asked.take_byte(offset - LEAVING),
            _ => 0,
        }
    }

    /// Writes the port at `offset`. Returns true if [`Self::take_ejected`] has vCPUs to return.
    pub fn write(&mut self, offset: u16, value: u8) -> bool {
        let ids = |register: u16| {
            let first = (offset - register).saturating_mul(8);
            (0..8).filter(move |bit| value >> bit & 1 != 0).filter_map(move |bit| u8::try_from(first + bit).ok())
        };
        match offset {
            EJECT..KEEP => ids(EJECT).for_each(|id| self.eject(id)),
            KEEP..PORTS => ids(KEEP).for_each(|id| {
                self.asked.remove(id);
                self.leaving.remove(id);
            }),
            _ => {}
        }
        !self.ejected.is_empty()
    }

    /// State to save.
    pub fn save(&self) -> VcpuHotplugState {
        let Self { max: _, present, added, asked, leaving, ejected } = *self;
        let [present, added, asked, leaving, ejected] =
            [present, added, asked, leaving, ejected].map(|set| set.iter().collect());
        VcpuHotplugState { present, added, asked, leaving, ejected }
    }

    /// Registers with the state `state` in a machine with at most `max` vCPUs; `None` if no guest can have caused it.
    pub fn restored(state: &VcpuHotplugState, max: u8) -> Option<Self> {
        let VcpuHotplugState { present, added, asked, leaving, ejected } = state;
        let [present, added, asked, leaving, ejected] =
            [present, added, asked, leaving, ejected].map(|ids| ids.iter().copied().collect::<Set>());
        let new = Self { max, present, added, asked, leaving, ejected };
        let exist = |id: u8| id < max && (present.contains(id) != ejected.contains(id));
        let is_possible = present.contains(0)
            && (present.iter().chain(ejected.iter())).all(exist)
            && added.iter().all(|id| present.contains(id))
            && leaving.iter().all(|id| id != 0 && present.contains(id))
            && asked.iter().all(|id| leaving.contains(id));
        (is_possible && new.save() == *state).then_some(new)
    }

    /// The vCPUs that the machine runs, by ascending numbers.
    pub fn running(&self) -> impl Iterator<Item = u8> + use<> {
        let (present, ejected) = (self.present, self.ejected);
        (0..=u8::MAX).filter(move |id| present.contains(*id) || ejected.contains(*id))
    }

    fn eject(&mut self, id: u8) {
        if id != 0 && self.present.contains(id) {
            for set in [&mut self.present, &mut self.added, &mut self.asked, &mut self.leaving] {
                set.remove(id);
            }
            self.ejected.insert(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes that the guest reads in a register.
    fn read(vcpus: &mut VcpuHotplug, register: u16) -> Vec<u8> {
        let bytes = std::array::from_fn(|n| vcpus.read(register + n as u16));
        Set(bytes).iter().collect()
    }

    /// The guest writes the bit of `id`.
    fn write(vcpus: &mut VcpuHotplug, register: u16, id: u8) -> bool {
        vcpus.write(register + u16::from(id / 8), 1 << (id % 8))
    }

    #[test]
    fn the_lowest_free_vcpus_are_added_and_reported_once() {
        let mut vcpus = VcpuHotplug::new(1, 12);
        assert_eq!(vcpus.resize(10), Change::Add((1..10).collect()));
        assert!(!vcpus.has_news(), "they are not there yet");
        (1..10).for_each(|id| vcpus.add(id));
        assert!(vcpus.has_news());
        assert_eq!(read(&mut vcpus, PRESENT), (0..10).collect::<Vec<_>>());
        assert_eq!(read(&mut vcpus, ADDED), (1..10).collect::<Vec<_>>());
        assert!(read(&mut vcpus, ADDED).is_empty() && !vcpus.has_news());
        assert_eq!(vcpus.resize(12), Change::Add(vec![10, 11]));
    }

    #[test]
    fn shrink_requests_highest_vcpus_and_keeps_them_until_ejected() {
        let mut vcpus = VcpuHotplug::new(4, 4);
        assert_eq!(vcpus.resize(2), Change::Asked);
        assert_eq!(read(&mut vcpus, LEAVING), [2, 3]);
        assert_eq!(vcpus.present(), 4);
        assert!(!vcpus.has_news());
        assert!(write(&mut vcpus, EJECT, 3));
        assert_eq!(vcpus.take_ejected().collect::<Vec<_>>(), [3]);
        assert_eq!(read(&mut vcpus, PRESENT), [0, 1, 2]);
        for count in 1..=4 {
            assert_eq!(vcpus.resize(count), Change::Unanswered(2));
        }
        assert!(read(&mut vcpus, LEAVING).is_empty());
        assert!(write(&mut vcpus, EJECT, 2));
        assert_eq!(vcpus.take_ejected().collect::<Vec<_>>(), [2]);
        assert_eq!(vcpus.take_ejected().count(), 0);
        assert_eq!(vcpus.resize(4), Change::Add(vec![2, 3]));
    }

    #[test]
    fn a_vcpu_that_the_guest_keeps_is_no_longer_requested() {
        let mut vcpus = VcpuHotplug::new(3, 4);
        assert_eq!(vcpus.resize(2), Change::Asked);
        assert!(!write(&mut vcpus, KEEP, 2));
        assert!(!vcpus.has_news());
        assert_eq!(vcpus.resize(4), Change::Add(vec![3]));
    }

    #[test]
    fn a_running_vcpu_cannot_be_added_again() {
        let mut vcpus = VcpuHotplug::new(2, 2);
        assert!(write(&mut vcpus, EJECT, 1), "a guest may eject what it was not asked for");
        assert_eq!(vcpus.resize(2), Change::Unanswered(1));
        assert_eq!(vcpus.take_ejected().collect::<Vec<_>>(), [1]);
        assert_eq!(vcpus.resize(2), Change::Add(vec![1]));
    }

    #[test]
    fn the_first_vcpu_never_goes() {
        let mut vcpus = VcpuHotplug::new(2, 2);
        assert!(!write(&mut vcpus, EJECT, 0));
        assert_eq!(vcpus.resize(0), Change::Asked);
        assert_eq!(read(&mut vcpus, LEAVING), [1]);
        assert_eq!(read(&mut vcpus, PRESENT), [0, 1]);
    }

    #[test]
    fn an_absent_vcpu_cannot_be_removed() {
        let mut vcpus = VcpuHotplug::new(2, 4);
        for id in [2, 3, 4, 255] {
            assert!(!write(&mut vcpus, EJECT, id), "{id}");
            assert!(!write(&mut vcpus, KEEP, id), "{id}");
        }
        assert_eq!(vcpus, VcpuHotplug::new(2, 4));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Resize(u8),
        Take,
        Read(u16),
        Write(u16, u8),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (1..=20u8).prop_map(Op::Resize),
            Just(Op::Take),
            any::<u16>().prop_map(|offset| Op::Read(offset % (PORTS + 8))),
            (any::<u16>(), any::<u8>()).prop_map(|(offset, value)| Op::Write(offset % (PORTS + 8), value)),
            // At ports with vCPUs.
            (EJECT..EJECT + 3, any::<u8>()).prop_map(|(offset, value)| Op::Write(offset, value)),
            (KEEP..KEEP + 3, any::<u8>()).prop_map(|(offset, value)| Op::Write(offset, value)),
        ]
    }

    proptest! {
        /// Running vCPUs are those present plus those whose ejection is not reported yet.
        #[test]
        fn whatever_a_guest_writes_machine_and_registers_agree(ops in prop::collection::vec(op(), 0..60)) {
            let mut vcpus = VcpuHotplug::new(3, 20);
            let mut running: Vec<u8> = vec![0, 1, 2];
            for op in ops {
                match op {
                    Op::Resize(count) => if let Change::Add(new) = vcpus.resize(count) {
                        for id in new {
                            prop_assert!(!running.contains(&id) && id < 20);
                            running.push(id);
                            vcpus.add(id);
                        }
                        prop_assert_eq!(vcpus.present(), usize::from(count));
                    },
                    Op::Take => for id in vcpus.take_ejected() {
                        prop_assert!(id != 0 && running.contains(&id));
                        running.retain(|other| *other != id);
                    },
                    Op::Read(offset) => _ = vcpus.read(offset),
                    Op::Write(offset, value) => _ = vcpus.write(offset, value),
                }
                let known: Vec<u8> = (0..=255).filter(|id| {
                    vcpus.present.contains(*id) || vcpus.ejected.contains(*id)
                }).collect();
                running.sort_unstable();
                prop_assert_eq!(&known, &running);
                prop_assert!(vcpus.leaving.iter().all(|id| id != 0 && vcpus.present.contains(id)));
                prop_assert!(vcpus.asked.iter().all(|id| vcpus.leaving.contains(id)));
            }
        }
    }
}
