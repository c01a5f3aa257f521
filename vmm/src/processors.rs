//! The registers by which vCPUs come and go while the guest runs: a state machine, without the guest's interrupt and without
//! threads.
//!
//! A vCPU is there, or can come. One that comes is there at once, and the guest is told (added). One that should go is there until
//! the guest lets it go (eject) or says that it keeps it (keep). vCPU 0 never goes.
//!
//! The registers are I/O ports that only the code of the ACPI tables uses (`acpi_processors.rs`). Each is of 32 ports with a bit for
//! each vCPU: vCPU n is bit `n % 8` of port `n / 8`.
//!
//! | offset | read | written |
//! |---|---|---|
//! | 0 | vCPUs that are there | nothing |
//! | 32 | vCPUs that came, which the read of a port clears in it | nothing |
//! | 64 | vCPUs that should go, which the read of a port clears in it | nothing |
//! | 96 | 0 | vCPUs that the guest has let go |
//! | 128 | 0 | vCPUs that should go and that the guest keeps |
//!
//! No write does more than a guest may do to itself: it can let go what is there but vCPU 0, and keep what it was asked for.

/// Registers of this many ports.
pub const PORTS: u16 = 5 * REGISTER;
/// The offset of the register that tells which vCPUs are there.
pub const PRESENT: u16 = 0;
/// The offset of the register that tells which came.
pub const ADDED: u16 = REGISTER;
/// The offset of the register that tells which should go.
pub const LEAVING: u16 = 2 * REGISTER;
/// The offset of the register by which the guest lets vCPUs go.
pub const EJECT: u16 = 3 * REGISTER;
/// The offset of the register by which the guest keeps vCPUs.
pub const KEEP: u16 = 4 * REGISTER;

/// How many ports a register has.
const REGISTER: u16 = 32;

/// Some vCPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Set([u8; REGISTER as usize]);

impl Set {
    /// The vCPUs from 0 to before `count`.
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

/// What has to happen for the guest to have the number of vCPUs that it should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Nothing, or what the guest was asked for.
    Asked,
    /// These vCPUs have to be made, and then given to [`Processors::add`].
    Add(Vec<u8>),
    /// The guest has to answer first whether it lets this vCPU go.
    Unanswered(u8),
}

/// Which vCPUs there are, and what guest and machine have still to tell each other of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Processors {
    /// How many there can be; their numbers are below.
    max: u8,
    present: Set,
    /// Those that came and that the guest was not told of yet.
    added: Set,
    /// Those that should go and that the guest was not told of yet.
    asked: Set,
    /// Those that should go, until the guest answers.
    leaving: Set,
    /// Those that the guest has let go and that the machine was not told of yet.
    ejected: Set,
}

impl Processors {
    /// vCPUs 0 to before `present`, of at most `max`, and nothing to tell.
    pub fn new(present: u8, max: u8) -> Self {
        Self { max, present: Set::first(present.min(max)), ..Self::default() }
    }

    /// Asks the guest for vCPUs if it should have fewer than it has, those with the highest numbers, or tells what to add.
    ///
    /// What the guest was asked for and has not answered counts as gone; it is asked again. More can only come once it has answered.
    pub fn resize(&mut self, vcpus: u8) -> Change {
        let staying: Vec<u8> = self.present.iter().filter(|id| !self.leaving.contains(*id)).collect();
        let wanted = usize::from(vcpus);
        if let Some(going) = staying.get(wanted..) {
            going.iter().filter(|id| **id != 0).for_each(|id| self.leaving.insert(*id));
            self.asked = self.leaving;
            return Change::Asked;
        }
        if let Some(first) = self.leaving.iter().next() {
            return Change::Unanswered(first);
        }
        let free = (0..self.max).filter(|id| !self.present.contains(*id));
        let new: Vec<u8> = free.take(wanted - staying.len()).collect();
        match new.iter().find(|id| self.ejected.contains(**id)) {
            // The machine still runs it.
            Some(id) => Change::Unanswered(*id),
            None => Change::Add(new),
        }
    }

    /// vCPU `id` came.
    pub fn add(&mut self, id: u8) {
        self.present.insert(id);
        self.added.insert(id);
    }

    /// Whether there is something that the guest was not told of.
    pub fn has_news(&self) -> bool {
        !(self.added.is_empty() && self.asked.is_empty())
    }

    /// How many are there.
    pub fn present(&self) -> usize {
        self.present.len()
    }

    /// The vCPUs that the guest has let go since the last call.
    pub fn take_ejected(&mut self) -> impl Iterator<Item = u8> + use<> {
        std::mem::take(&mut self.ejected).iter()
    }

    /// Reads the port at `offset`; behind the registers there is 0.
    pub fn read(&mut self, offset: u16) -> u8 {
        match offset {
            PRESENT..ADDED => self.present.byte(offset),
            ADDED..LEAVING => self.added.take_byte(offset - ADDED),
            LEAVING..EJECT => self.asked.take_byte(offset - LEAVING),
            _ => 0,
        }
    }

    /// Writes the port at `offset`, and returns whether there is something for [`Self::take_ejected`].
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

    /// What the guest reads in a register.
    fn read(processors: &mut Processors, register: u16) -> Vec<u8> {
        let bytes = std::array::from_fn(|n| processors.read(register + n as u16));
        Set(bytes).iter().collect()
    }

    /// The guest writes the bit of `id`.
    fn write(processors: &mut Processors, register: u16, id: u8) -> bool {
        processors.write(register + u16::from(id / 8), 1 << (id % 8))
    }

    #[test]
    fn the_lowest_that_are_free_come_and_are_told_once() {
        let mut processors = Processors::new(1, 12);
        assert_eq!(processors.resize(10), Change::Add((1..10).collect()));
        assert!(!processors.has_news(), "they are not there yet");
        (1..10).for_each(|id| processors.add(id));
        assert!(processors.has_news());
        assert_eq!(read(&mut processors, PRESENT), (0..10).collect::<Vec<_>>());
        assert_eq!(read(&mut processors, ADDED), (1..10).collect::<Vec<_>>());
        assert!(read(&mut processors, ADDED).is_empty() && !processors.has_news());
        assert_eq!(processors.resize(12), Change::Add(vec![10, 11]));
    }

    #[test]
    fn the_guest_is_asked_for_the_highest_and_they_stay_until_it_lets_them_go() {
        let mut processors = Processors::new(4, 4);
        assert_eq!(processors.resize(2), Change::Asked);
        assert_eq!(read(&mut processors, LEAVING), [2, 3]);
        assert_eq!(processors.present(), 4);
        assert!(!processors.has_news());
        assert!(write(&mut processors, EJECT, 3));
        assert_eq!(processors.take_ejected().collect::<Vec<_>>(), [3]);
        assert_eq!(read(&mut processors, PRESENT), [0, 1, 2]);
        assert_eq!(processors.resize(3), Change::Unanswered(2));
        assert_eq!(processors.resize(2), Change::Asked, "it is asked again");
        assert_eq!(read(&mut processors, LEAVING), [2]);
        assert!(write(&mut processors, EJECT, 2));
        assert_eq!(processors.take_ejected().collect::<Vec<_>>(), [2]);
        assert_eq!(processors.take_ejected().count(), 0);
        assert_eq!(processors.resize(4), Change::Add(vec![2, 3]));
    }

    #[test]
    fn what_the_guest_keeps_it_is_no_longer_asked_for() {
        let mut processors = Processors::new(3, 4);
        assert_eq!(processors.resize(2), Change::Asked);
        assert!(!write(&mut processors, KEEP, 2));
        assert!(!processors.has_news());
        assert_eq!(processors.resize(4), Change::Add(vec![3]));
    }

    #[test]
    fn what_runs_still_cannot_come_again() {
        let mut processors = Processors::new(2, 2);
        assert!(write(&mut processors, EJECT, 1), "a guest may let go what it was not asked for");
        assert_eq!(processors.resize(2), Change::Unanswered(1));
        assert_eq!(processors.take_ejected().collect::<Vec<_>>(), [1]);
        assert_eq!(processors.resize(2), Change::Add(vec![1]));
    }

    #[test]
    fn the_first_vcpu_never_goes() {
        let mut processors = Processors::new(2, 2);
        assert!(!write(&mut processors, EJECT, 0));
        assert_eq!(processors.resize(0), Change::Asked);
        assert_eq!(read(&mut processors, LEAVING), [1]);
        assert_eq!(read(&mut processors, PRESENT), [0, 1]);
    }

    #[test]
    fn what_is_not_there_cannot_go() {
        let mut processors = Processors::new(2, 4);
        for id in [2, 3, 4, 255] {
            assert!(!write(&mut processors, EJECT, id), "{id}");
            assert!(!write(&mut processors, KEEP, id), "{id}");
        }
        assert_eq!(processors, Processors::new(2, 4));
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
            // Where there are vCPUs.
            (EJECT..EJECT + 3, any::<u8>()).prop_map(|(offset, value)| Op::Write(offset, value)),
            (KEEP..KEEP + 3, any::<u8>()).prop_map(|(offset, value)| Op::Write(offset, value)),
        ]
    }

    proptest! {
        /// The vCPUs that the machine runs are those that are there and those whose end it was not told.
        #[test]
        fn whatever_a_guest_writes_machine_and_registers_agree(ops in prop::collection::vec(op(), 0..60)) {
            let mut processors = Processors::new(3, 20);
            let mut running: Vec<u8> = vec![0, 1, 2];
            for op in ops {
                match op {
                    Op::Resize(vcpus) => if let Change::Add(new) = processors.resize(vcpus) {
                        for id in new {
                            prop_assert!(!running.contains(&id) && id < 20);
                            running.push(id);
                            processors.add(id);
                        }
                        prop_assert_eq!(processors.present(), usize::from(vcpus));
                    },
                    Op::Take => for id in processors.take_ejected() {
                        prop_assert!(id != 0 && running.contains(&id));
                        running.retain(|other| *other != id);
                    },
                    Op::Read(offset) => _ = processors.read(offset),
                    Op::Write(offset, value) => _ = processors.write(offset, value),
                }
                let known: Vec<u8> = (0..=255).filter(|id| {
                    processors.present.contains(*id) || processors.ejected.contains(*id)
                }).collect();
                running.sort_unstable();
                prop_assert_eq!(&known, &running);
                prop_assert!(processors.leaving.iter().all(|id| id != 0 && processors.present.contains(id)));
                prop_assert!(processors.asked.iter().all(|id| processors.leaving.contains(id)));
            }
        }
    }
}
