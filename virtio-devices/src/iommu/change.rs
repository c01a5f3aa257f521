//! What a change of the table leads to: waiting for passes, and telling whoever follows.

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

/// What has to be done after the table was changed, without its lock.
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

impl Change {
    /// Finishes it: when this returns, what was taken away is out of reach, and what was given is within.
    ///
    /// # Errors
    ///
    /// [`Unfinished`]: the caller undoes what it has given.
    pub(crate) fn finish(self) -> Result<(), Unfinished> {
        match self {
            Self::None => Ok(()),
            Self::Mapped(mapping, endpoints) => {
                let mut followers = endpoints.iter().filter_map(|endpoint| endpoint.follower());
                followers.try_for_each(|follower| follower.mapped(mapping)).map_err(|NotFollowed| Unfinished::NotGiven)
            }
            Self::Unmapped(mappings, endpoints) => {
                let mut done = Ok(());
                for endpoint in endpoints {
                    // All of them have lost it; what passes have begun may still use it, or pass it on, until they end.
                    endpoint.await_passes();
                    if let Some(follower) = endpoint.follower() {
                        follower.unmapped(&mappings);
                        done = forgotten(&*follower).and(done);
                    }
                }
                done
            }
            Self::Attached(endpoints) => {
                endpoints.iter().for_each(|endpoint| endpoint.await_passes());
                // All are told, whatever becomes of the first.
                let mut done = Ok(());
                for endpoint in endpoints {
                    let told = endpoint.tell_reach().map_err(|NotFollowed| Unfinished::NotGiven);
                    let taken = endpoint.follower().map_or(Ok(()), |follower| forgotten(&*follower));
                    done = taken.and(told).and(done);
                }
                done
            }
        }
    }
}

fn forgotten(follower: &dyn DmaFollower) -> Result<(), Unfinished> {
    if follower.has_forgotten() { Ok(()) } else { Err(Unfinished::NotTaken) }
}
