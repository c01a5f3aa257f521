//! Interrupts that get lost because the host asks for it, for tests of drivers.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The interrupts of a function that will be lost. A reset of the function changes nothing of this.
#[derive(Default)]
pub(crate) struct LostInterrupts {
    /// True while interrupts are lost. Otherwise no worker takes the lock.
    is_armed: AtomicBool,
    armed: Mutex<Option<Armed>>,
}

struct Armed {
    /// The function, as lines of the log begin.
    name: String,
    /// The only vector whose interrupts are lost, if there is one.
    vector: Option<u16>,
    /// Number of interrupts that will be lost.
    left: u32,
}

impl fmt::Debug for LostInterrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LostInterrupts").field("is_armed", &self.is_armed).finish_non_exhaustive()
    }
}

impl LostInterrupts {
    /// Loses the next `count` interrupts of `vector`, or of any vector, of the function `name`, instead of those that
    /// an earlier call named.
    pub(crate) fn arm(&self, name: String, vector: Option<u16>, count: u32) {
        let mut armed = self.armed.lock();
        *armed = (count > 0).then_some(Armed { name, vector, left: count });
        self.is_armed.store(count > 0, Ordering::Release);
    }

    /// True if this interrupt of `vector` is lost. It then counts as lost.
    pub(crate) fn loses(&self, vector: u16) -> bool {
        if !self.is_armed.load(Ordering::Acquire) {
            return false;
        }
        let mut armed = self.armed.lock();
        let Some(Armed { name, left, .. }) =
            armed.as_mut().filter(|armed| armed.vector.is_none_or(|one| one == vector))
        else {
            return false;
        };
        *left = left.saturating_sub(1);
        log::info!("{name}: dropped an interrupt of vector {vector} (vm.inject-fault); {left} more will be dropped");
        if *left == 0 {
            *armed = None;
            self.is_armed.store(false, Ordering::Release);
        }
        true
    }
}
