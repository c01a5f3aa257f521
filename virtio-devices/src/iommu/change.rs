//! Consequences of a change of the table: follower notifications, and waits for passes.

use std::sync::Arc;

use super::endpoint::Endpoint;
use crate::memory::{DmaFollower, DmaMapping, NotFollowed};

/// A change that was not finished as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfinished {
    /// A follower could not take what was given.
    NotGiven,
    /// Memory that was taken away may still be within reach.
    NotTaken,
}

/// Work that remains after the table was changed, to be done without its lock.
#[must_use = "what was taken away is within reach until this is finished"]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// These endpoints reach one mapping more.
    Mapped(DmaMapping, Vec<Arc<Endpoint>>),
    /// These endpoints have lost mappings, at least one.
    Unmapped(Vec<DmaMapping>, Vec<Arc<Endpoint>>),
    /// These endpoints reach something else than before.
    Attached(Vec<Arc<Endpoint>>),
}

/// Endpoints without a follower that have lost something, and whose passes are still to be waited for. Nothing is told
/// of them in order, so [`Common::order`](super::endpoint::Common::order) is free by then: a function whose passes are
/// long holds up no change of another's.
#[must_use = "what was taken away is within reach until this has been waited for"]
#[derive(Default)]
pub(crate) struct Passes(Vec<Arc<Endpoint>>);

impl Passes {
    /// Waits until all passes have ended that had begun. When this returns, what was taken away is out of reach.
    pub(crate) fn wait(self) {
        self.0.iter().for_each(|endpoint| endpoint.await_passes());
    }
}

impl Change {
    /// Tells followers, after the passes of their functions, and returns whose passes are to be waited for then. When
    /// that is done, what was taken away is out of reach, and what was given is within.
    ///
    /// # Errors
    ///
    /// [`Unfinished`], beside the passes: the caller undoes what it has given.
    pub(crate) fn tell(self) -> (Result<(), Unfinished>, Passes) {
        match self {
            Self::None => (Ok(()), Passes::default()),
            Self::Mapped(mapping, endpoints) => {
                let mut followers = endpoints.iter().filter_map(|endpoint| endpoint.follower());
                let given = followers.try_for_each(|follower| follower.mapped(mapping));
                (given.map_err(|NotFollowed| Unfinished::NotGiven), Passes::default())
            }
            Self::Unmapped(mappings, endpoints) => {
                let (followed, alone) = divide(endpoints);
                let mut done = Ok(());
                for endpoint in followed {
                    // All of them have lost it; what passes have begun may still use it, or pass it on, until they end.
                    endpoint.await_passes();
                    if let Some(follower) = endpoint.follower() {
                        follower.unmapped(&mappings);
                        done = forgotten(&*follower).and(done);
                    }
                }
                (done, alone)
            }
            Self::Attached(endpoints) => {
                let (followed, alone) = divide(endpoints);
                followed.iter().for_each(|endpoint| endpoint.await_passes());
                // All are told, whatever becomes of the first.
                let mut done = Ok(());
                for endpoint in followed {
                    let told = endpoint.tell_reach().map_err(|NotFollowed| Unfinished::NotGiven);
                    let taken = endpoint.follower().map_or(Ok(()), |follower| forgotten(&*follower));
                    done = taken.and(told).and(done);
                }
                (done, alone)
            }
        }
    }
}

fn forgotten(follower: &dyn DmaFollower) -> Result<(), Unfinished> {
    if follower.has_forgotten() { Ok(()) } else { Err(Unfinished::NotTaken) }
}

/// Divides endpoints into those that have a follower, which does not change meanwhile, and the others.
fn divide(endpoints: Vec<Arc<Endpoint>>) -> (Vec<Arc<Endpoint>>, Passes) {
    let (followed, alone) = endpoints.into_iter().partition(|endpoint| endpoint.follower().is_some());
    (followed, Passes(alone))
}
