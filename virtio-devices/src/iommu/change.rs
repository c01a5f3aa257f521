//! Consequences of a change of the table: follower notifications, and waits for passes.

use std::sync::Arc;

use super::endpoint::Endpoint;
use crate::memory::{DmaFollower, DmaMapping, NotFollowed};

/// The reason why a change is incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfinished {
    /// A follower could not take a new mapping.
    NotGiven,
    /// Unmapped memory may still be reachable.
    NotTaken,
}

/// Work that remains after the table was changed, done without its lock.
#[must_use = "what was taken away is within reach until this is finished"]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// These endpoints have a new mapping.
    Mapped(DmaMapping, Vec<Arc<Endpoint>>),
    /// These endpoints have lost mappings, at least one.
    Unmapped(Vec<DmaMapping>, Vec<Arc<Endpoint>>),
    /// These endpoints have other mappings than before.
    Attached(Vec<Arc<Endpoint>>),
}

/// Endpoints without a follower that have lost mappings, and whose passes must be waited for. This needs no order, so
/// [`Common::order`](super::endpoint::Common::order) is released first: a function with long passes delays no change of
/// another's.
#[must_use = "what was taken away is within reach until this has been waited for"]
#[derive(Default)]
pub(crate) struct Passes(Vec<Arc<Endpoint>>);

impl Passes {
    /// Waits for the end of all passes that had begun. When this returns, unmapped memory is unreachable.
    pub(crate) fn wait(self) {
        self.0.iter().for_each(|endpoint| endpoint.await_passes());
    }
}

impl Change {
    /// Notifies followers, after the passes of their functions, and returns the endpoints whose passes must be waited
    /// for next. After that, unmapped memory is unreachable, and mapped memory is reachable.
    ///
    /// # Errors
    ///
    /// [`Unfinished`], in addition to the passes: the caller undoes its mappings.
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
                    // All of them have lost the mappings; passes that have begun may still use them, or pass them on,
                    // until they end.
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
                // All are notified, even if one fails.
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

/// Divides endpoints into those with a follower, which does not change in the meantime, and the others.
fn divide(endpoints: Vec<Arc<Endpoint>>) -> (Vec<Arc<Endpoint>>, Passes) {
    let (followed, alone) = endpoints.into_iter().partition(|endpoint| endpoint.follower().is_some());
    (followed, Passes(alone))
}
