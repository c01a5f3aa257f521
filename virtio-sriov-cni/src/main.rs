//! CNI plugin that gives virtio VFs of a guest to its containers.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use virtio_sriov_cni::error::Error;
use virtio_sriov_cni::parameters::Environment;
use virtio_sriov_cni::run;
use virtio_sriov_cni::system::System;
use virtio_sriov_cni::version::Version;

/// Longest configuration in bytes; that of a pod has some kilobytes.
const LONGEST: u64 = 16 << 20;

fn main() -> ExitCode {
    let mut input = Vec::new();
    let (output, code) = match io::stdin().lock().take(LONGEST).read_to_end(&mut input) {
        Ok(_) => run(&System::real(), &Environment::of_process(), &input),
        Err(error) => (Error::io("reading standard input", &error).to_json(Version::NEWEST.as_str()), 1),
    };
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(output.as_bytes()).and_then(|()| stdout.flush());
    match written {
        Ok(()) => ExitCode::from(code),
        // A runtime that has closed the pipe does not read the reason either.
        Err(_) => ExitCode::FAILURE,
    }
}
