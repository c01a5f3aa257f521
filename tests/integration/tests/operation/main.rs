//! A VMM in the hands of its user: clients, events, units, terminals and refusals.

mod clients;
mod events;
mod refused;
mod silence;
mod systemd;
mod terminal;
