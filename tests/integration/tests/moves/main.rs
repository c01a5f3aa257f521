//! Guests that continue in another VMM: by migrations and snapshots.

mod migration;
mod migration_bond;
mod snapshot;
