//! Longer runs of a test: the variables that set its number of repetitions.

use std::env;

/// The number in the environment's `variable`, or else `default`. `xtask/src/checks/suite.rs` lists the variables.
pub fn repetitions(variable: &str, default: usize) -> usize {
    env::var(variable).map_or(default, |number| number.parse().unwrap_or_else(|_| panic!("{variable}: {number:?}")))
}

/// Runs a test's body, which boots a guest, `CH_VFIO_BOOTS` times, and prints a line after each.
pub fn for_each_boot(mut body: impl FnMut()) {
    let boots = repetitions("CH_VFIO_BOOTS", 1);
    for boot in 1..=boots {
        body();
        println!("boot {boot} of {boots} ended well");
    }
}
