use super::*;

fn apart(after_ns: f64) -> Option<Apart> {
    Some(Apart {
        before_ns: 60.0,
        after_ns,
        is_shared: false,
        is_near: after_ns < 90.0,
    })
}

fn measured(targets: Vec<Target>) -> Measured {
    let report = || vec![json!({"share": 0.5})];
    let result = |name, samples: &[f64]| (name, Summary::of(samples).unwrap(), report());
    Measured {
        key: "k",
        title: "t",
        unit: Unit::GbitPerSecond,
        // The medians' ratio is 1; the median of the rounds' ratios is 2.
        cores: [60.0, 60.0, 400.0].map(apart).into(),
        results: vec![result("LM", &[2.0, 4.0, 8.0]), result("UDP", &[1.0, 2.0, 16.0])],
        targets,
    }
}

#[test]
fn ratios_are_taken_within_a_round() {
    assert_eq!(measured(vec![]).ratio_to("UDP").unwrap().median, 2.0);
    assert_eq!(measured(vec![]).ratio_to("nobody"), None);
}

#[test]
fn every_round_counts_and_near_ones_stand_beside() {
    let far_last = Measured {
        results: vec![
            ("LM", Summary::of(&[2.0, 2.0, 9.0]).unwrap(), Vec::new()),
            ("UDP", Summary::of(&[1.0, 2.0, 1.0]).unwrap(), Vec::new()),
        ],
        ..measured(vec![])
    };
    assert_eq!(far_last.ratio("LM", "UDP").unwrap().samples, [2.0, 1.0, 9.0]);
    let near = far_last.near_only().unwrap();
    assert_eq!(near.ratio("LM", "UDP").unwrap().samples, [2.0, 1.0]);
    let json = far_last.to_json();
    assert_eq!(json["contenders"][1]["lm_ratio"]["median"], 2.0);
    assert_eq!(json["contenders"][1]["lm_ratio_near"]["median"], 1.5);
    assert_eq!(json["cores"][2]["after_ns"], 400.0);
}

#[test]
fn verdicts_compare_with_what_was_asked() {
    let targets = vec![
        Target::RatioAtLeast("UDP", 1.8),
        Target::RatioAtLeast("UDP", 2.2),
        Target::AtMost(4.0),
        Target::ReportAtLeast("of its share", |report| report["share"].as_f64(), 0.6),
        Target::ReportAtLeast("of its share", |report| report["share"].as_f64(), 0.5),
        Target::RatioAtMost("UDP", 2.0),
        Target::RatioAtMost("UDP", 1.9),
        Target::RatioOfAtMost(["UDP", "LM"], 0.5),
        Target::RatioOfAtMost(["UDP", "LM"], 0.4),
        // Of the rounds' ratios: 2, 2, 0.5.
        Target::RatioSurelyAtMost("UDP", 2.0),
        Target::RatioSurelyAtMost("UDP", 1.9),
        // Of the rounds' differences: 1, 2, −8.
        Target::ExcessAtMost(&["UDP"], 1.0),
        Target::ExcessAtMost(&["UDP"], 0.9),
        Target::ExcessAtMost(&["UDP", "UDP"], 0.0),
    ];
    let met: Vec<bool> = measured(targets)
        .verdicts()
        .into_iter()
        .map(|(_, _, met)| met)
        .collect();
    assert_eq!(
        met,
        [
            true, false, true, false, true, true, false, true, false, true, false, true, false, true
        ]
    );
}

#[test]
fn a_column_has_those_who_have_the_quantity() {
    let mut one = measured(vec![]);
    let column = |place| Column {
        place,
        title: "t",
        unit: Unit::Percent,
        targets: &[],
    };
    for (number, (.., reports)) in one.results.iter_mut().enumerate() {
        *reports = vec![json!({"all": 1.0, (["first", "second"][number]): 2.0}); 3];
    }
    let of = |place| {
        let column = one.column(&column(place))?;
        Some(column.results.iter().map(|(name, ..)| *name).collect::<Vec<_>>())
    };
    assert_eq!(of("/all"), Some(vec!["LM", "UDP"]));
    assert_eq!(of("/first"), Some(vec!["LM"]));
    assert_eq!(of("/second"), None);
}
