//! Interrupts of the NIC: from an event or an access to the messages of a function.

use crate::effects::{Direction, Effects, Place};
use crate::interrupts::{Routing, vector};
use crate::moderation::Report;
use crate::nic::Nic;
use crate::queue::{self, QUEUES};
use crate::shape::TOTAL_VFS;
use crate::spec::{self, vf};
use crate::vectors::{Sent, Vectors};
use crate::vf::queue_byte;

impl Nic {
    /// Sets the time, in microseconds since any moment: that of all later accesses and events. It never goes back.
    pub fn set_time(&mut self, now: u64) {
        self.timers.now = self.timers.now.max(now);
    }

    /// The time at which [`Self::send_deferred`] has something to do; `None` if nothing waits.
    pub fn due(&self) -> Option<u64> {
        self.timers.waiting().filter_map(|(_, moderation)| moderation.due()).min()
    }

    /// Sends the messages whose time has come.
    pub fn send_deferred(&mut self) -> Effects {
        self.send_until(self.timers.now, None)
    }

    /// Sends the messages of a function that wait, or of all functions, whatever the time is.
    pub fn flush(&mut self, place: Option<Place>) -> Effects {
        self.send_until(u64::MAX, place)
    }

    fn send_until(&mut self, time: u64, only: Option<Place>) -> Effects {
        let mut effects = Effects::NONE;
        let waiting: Vec<Place> = self.timers.waiting().map(|(place, _)| place).collect();
        for place in waiting {
            if only.is_some_and(|only| only != place) {
                continue;
            }
            let (messages, reports) = self.timers.take(place, time);
            let masks = self.routing().masks;
            let Some(vectors) = self.vectors_mut(place) else { continue };
            // Intervals of vectors with a report have ended, or the time does not matter.
            let sent = vectors.send(messages, masks) | vectors.raise(reports, masks);
            effects = effects.and(self.sent(place, sent));
        }
        effects
    }

    /// Sends vectors because of their queues, which begins their intervals.
    fn sent(&mut self, place: Place, vectors: u64) -> Effects {
        self.begin(place, vectors);
        Effects::send(place, vectors)
    }

    /// Begins the intervals of vectors whose messages are sent now.
    fn begin(&mut self, place: Place, vectors: u64) {
        if vectors != 0 {
            let intervals: Vec<(u16, u32)> = (0..64)
                .filter(|vector| vectors >> vector & 1 != 0)
                .map(|vector| (vector, self.interval(place, vector)))
                .collect();
            let now = self.timers.now;
            if let Some(moderation) = self.timers.of(place) {
                let of = |vector| intervals.iter().find(|(other, _)| *other == vector).map_or(0, |found| found.1);
                moderation.sent(vectors, now, of);
            }
        }
    }

    /// Ends an access that may have enabled vectors: sends messages, and makes those within an interval wait.
    pub(crate) fn messages(&mut self, place: Place, Sent { now, other, later }: Sent) -> Effects {
        let is_new = later != 0 && self.defer(place, later);
        self.begin(place, now);
        Effects { moderation: is_new, ..Effects::send(place, now | other) }
    }

    fn defer(&mut self, place: Place, vectors: u64) -> bool {
        self.timers.note(place);
        self.timers.of(place).is_some_and(|moderation| moderation.defer(vectors))
    }

    /// The vectors of a function whose interval runs now.
    pub(crate) fn running(&mut self, place: Place) -> u64 {
        let now = self.timers.now;
        self.timers.of(place).map_or(0, |moderation| moderation.running(now))
    }

    fn vectors_mut(&mut self, place: Place) -> Option<&mut Vectors> {
        match place {
            Place::Pf => Some(&mut self.interrupts.vectors),
            Place::Vf(index) => Some(&mut self.vfs.get_mut(usize::from(index))?.vectors),
        }
    }

    /// Follows a write of the interval at `offset`: one of 0 ends the interval that runs.
    pub(crate) fn interval_written(&mut self, place: Place, offset: u32) -> Effects {
        let vector = match offset {
            0x820..0x880 => (offset - 0x820) / 4,
            _ => 24 + offset.saturating_sub(spec::EITR_24) / 4,
        };
        let Ok(vector) = u16::try_from(vector) else { return Effects::NONE };
        if self.interval(place, vector) != 0 {
            return Effects::NONE;
        }
        self.timers.of(place).into_iter().for_each(|moderation| moderation.end(vector));
        self.send_deferred()
    }

    /// The registers that direct the PF's interrupts.
    pub(crate) fn routing(&self) -> Routing {
        let [_, other, ..] = self.registers.get(spec::IVAR_MISC).to_le_bytes();
        Routing { masks: self.registers.get(spec::GPIE) & spec::GPIE_EIAME != 0, other: vector(other), running: 0 }
    }

    /// Sets causes of EICR that are no queue's.
    pub(crate) fn raise(&mut self, causes: u32) -> Effects {
        let routing = self.routing();
        Effects::send(Place::Pf, self.interrupts.raise_other(causes, routing))
    }

    /// The function that a queue belongs to, and its vector, a bit; 0 without one.
    fn vector_of(&self, direction: Direction, queue: u16) -> (Place, u64) {
        let (place, own) = self.owner(queue);
        let allocation = match place {
            Place::Pf => self.registers.get(spec::IVAR + 4 * u32::from(queue / 2)),
            Place::Vf(index) => {
                let of_vf = self.vfs.get(usize::from(index));
                of_vf.and_then(|vf| vf.allocation.get(usize::from(own / 2))).copied().unwrap_or(0)
            }
        };
        let mask = if place == Place::Pf { u64::MAX } else { crate::vf::VECTORS };
        (place, vector(queue_byte(allocation, direction, own)) & mask)
    }

    /// Reports an event of a queue: descriptors were written back. Returns the vector to send. Within the vector's
    /// interval it is sent later, by [`Self::send_deferred`].
    pub fn queue_event(&mut self, direction: Direction, queue: u16) -> Effects {
        if queue >= QUEUES {
            return Effects::NONE;
        }
        let (place, cause) = self.vector_of(direction, queue);
        self.event(place, cause)
    }

    fn event(&mut self, place: Place, cause: u64) -> Effects {
        let (masks, running) = (self.routing().masks, self.running(place));
        let Some(vectors) = self.vectors_mut(place) else { return Effects::NONE };
        let new = vectors.set(cause);
        let sent = vectors.send(new & !running, masks);
        if new & running != 0 {
            self.defer(place, new & running);
        }
        self.sent(place, sent)
    }

    /// Reports that frames of transmit queue `queue` were sent, and their `descriptors` written back. If its vector is
    /// moderated, the driver learns it with the next message of the vector, or from [`Self::send_deferred`] a moment
    /// later, unless there is much to report: a quarter of the ring, or many bytes.
    pub fn frames_sent(&mut self, queue: u16, descriptors: u32, bytes: u64) -> Effects {
        if queue >= QUEUES {
            return Effects::NONE;
        }
        let (place, cause) = self.vector_of(Direction::Transmit, queue);
        let vector = u16::try_from(cause.trailing_zeros()).unwrap_or(u16::MAX);
        let interval = self.interval(place, vector);
        // A ring must not fill up, however many descriptors its frames have.
        let most = self.transmit_queue(queue).len / 16 / 4;
        let now = self.timers.now;
        if interval != 0
            && let Some(moderation) = self.timers.of(place)
            && moderation.put_off(vector, now, interval, Report::of(descriptors, bytes), most)
        {
            self.timers.note(place);
            return Effects::NONE;
        }
        self.event(place, cause)
    }

    /// The function that owns a queue of the NIC, and the number of the queue in that function. A pool belongs to the
    /// VF of its index if that exists, and to the PF otherwise.
    pub fn owner(&self, queue: u16) -> (Place, u16) {
        match queue.checked_div(queue::per_pool(&self.registers)).filter(|pool| *pool < self.num_vfs) {
            Some(pool) => (Place::Vf(pool), queue % queue::per_pool(&self.registers)),
            None => (Place::Pf, queue),
        }
    }

    /// The least time between two messages of a vector, in microseconds; 0 does not limit it.
    pub fn interval(&self, place: Place, vector: u16) -> u32 {
        let n = u32::from(vector);
        let register = match (place, n) {
            (Place::Pf, 0..24) => self.registers.get(spec::EITR + 4 * n),
            (Place::Pf, 24..128) => self.registers.get(spec::EITR_24 + 4 * (n - 24)),
            (Place::Vf(index), 0..3) => {
                let own = self.vfs.get(usize::from(index.min(TOTAL_VFS - 1)));
                own.map_or(0, |own| own.peek(vf::VTEITR + 4 * n))
            }
            _ => 0,
        };
        (register & spec::EITR_INTERVAL) >> 2
    }
}
