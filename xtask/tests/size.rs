//! The sizes that `xtask/size.txt` allows: what is above its ceiling is red.

#[test]
fn nothing_is_larger_than_it_may_be() {
    let programs = [xtask::cli::command(), lm_bench::measuring::command()];
    let complaints = xtask::size::complaints(&programs).unwrap();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}
