//! The program itself: standard input and output, environment, exit code. Its commands are tested in
//! `tests/fixtures/tests/cni`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use assert_cmd::Command;
use serde_json::{Value, json};

/// Runs the program. Returns its exit code and standard output.
fn run(command: Option<&str>, input: &str) -> (i32, Value) {
    let mut program = Command::cargo_bin("virtio-sriov-cni").unwrap();
    program.env_clear().envs(command.map(|command| ("CNI_COMMAND", command))).write_stdin(input);
    let output = program.output().unwrap();
    (output.status.code().unwrap(), serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_program_prints_versions_and_ends_with_0() {
    let (code, output) = run(Some("VERSION"), r#"{"cniVersion": "1.0.0"}"#);
    let versions = json!(["0.3.1", "0.4.0", "1.0.0", "1.1.0"]);
    assert_eq!((code, output), (0, json!({"cniVersion": "1.0.0", "supportedVersions": versions})));
}

#[test]
fn the_program_prints_an_error_and_ends_with_1() {
    let network = r#"{"cniVersion": "1.0.0", "name": "net", "type": "virtio-sriov-cni"}"#;
    for (command, input, expected, start) in [
        (None, network, 4, "CNI_COMMAND: "),
        (Some("ERASE"), network, 4, "CNI_COMMAND=ERASE: "),
        (Some("ADD"), network, 4, "CNI_CONTAINERID: "),
        (Some("ADD"), "", 6, "configuration on standard input: "),
        (Some("VERSION"), "[", 6, "configuration on standard input: "),
    ] {
        let (code, output) = run(command, input);
        let message = output["msg"].as_str().unwrap();
        assert_eq!((code, output["code"].as_u64()), (1, Some(expected)), "{output}");
        assert!(message.starts_with(start) && !message.contains('\n'), "{message}");
    }
}

#[test]
fn status_without_a_channel_is_50_with_a_remedy() {
    let network = r#"{"cniVersion": "1.1.0", "name": "net", "type": "virtio-sriov-cni"}"#;
    let (code, output) = run(Some("STATUS"), network);
    assert_eq!((code, &output["code"]), (1, &json!(50)));
    assert!(output["msg"].as_str().unwrap().contains("guest_control="), "{output}");
}
