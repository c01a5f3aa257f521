//! The moderation of all functions, and the time of the NIC.

use crate::effects::Place;
use crate::moderation::Moderation;
use crate::shape::TOTAL_VFS;

/// Vectors of the PF, and of a VF.
const VECTORS: (u16, u16) = (64, 3);

/// The moderation of all functions.
#[derive(Debug, Clone)]
pub(crate) struct Timers {
    /// The time, in microseconds since any moment.
    pub(crate) now: u64,
    /// The PF, then the VFs by index.
    functions: Box<[Moderation]>,
    /// Functions that may wait for something, a bit for each.
    waiting: u64,
}

/// Only what waits is compared: the time is that of the host.
impl PartialEq for Timers {
    fn eq(&self, other: &Self) -> bool {
        self.functions == other.functions
    }
}

impl Eq for Timers {}

/// The number of a function among all.
fn number(place: Place) -> u16 {
    match place {
        Place::Pf => 0,
        Place::Vf(index) => index.saturating_add(1),
    }
}

fn bit(place: Place) -> u64 {
    1_u64.checked_shl(number(place).into()).unwrap_or(0)
}

impl Timers {
    /// Nothing waits.
    pub(crate) fn new() -> Self {
        let vfs = (0..TOTAL_VFS).map(|_| Moderation::new(VECTORS.1));
        Self { now: 0, functions: std::iter::once(Moderation::new(VECTORS.0)).chain(vfs).collect(), waiting: 0 }
    }

    /// Ends the intervals of all functions, or of one.
    pub(crate) fn reset(&mut self, place: Option<Place>) {
        match place {
            Some(place) => self.of(place).into_iter().for_each(Moderation::reset),
            None => {
                self.functions.iter_mut().for_each(Moderation::reset);
                self.waiting = 0;
            }
        }
    }

    /// The moderation of a function.
    pub(crate) fn of(&mut self, place: Place) -> Option<&mut Moderation> {
        self.functions.get_mut(usize::from(number(place)))
    }

    /// Records that a function waits for something.
    pub(crate) fn note(&mut self, place: Place) {
        self.waiting |= bit(place);
    }

    /// Takes what is due of a function at the time `time`; see [`Moderation::take`].
    pub(crate) fn take(&mut self, place: Place, time: u64) -> (u64, u64) {
        let Some(moderation) = self.of(place) else { return (0, 0) };
        let taken = moderation.take(time);
        if moderation.due().is_none() {
            self.waiting &= !bit(place);
        }
        taken
    }

    /// The functions that may wait for something.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (Place, &Moderation)> {
        let mut rest = self.waiting;
        let numbers = std::iter::from_fn(move || {
            let number = rest.trailing_zeros();
            rest &= rest.wrapping_sub(1);
            (number < u64::BITS).then_some(number)
        });
        numbers.filter_map(|number| {
            let place = u16::try_from(number).ok()?.checked_sub(1).map_or(Place::Pf, Place::Vf);
            Some((place, self.functions.get(usize::try_from(number).ok()?)?))
        })
    }
}
