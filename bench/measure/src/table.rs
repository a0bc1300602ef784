//! Plain text tables: first column to the left, all others to the right.

/// Rows of cells under a line of headings.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(headings: &[&str]) -> Table {
        Table {
            rows: vec![headings.iter().map(|&heading| heading.to_owned()).collect()],
        }
    }

    /// Whether it has no rows but its headings.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// Adds a row. Cells beyond the headings are dropped, missing ones stay empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.rows[0].len(), String::new());
        self.rows.push(row);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows[0].len();
        let lens = |column: usize| self.rows.iter().map(move |row| row[column].chars().count());
        let widths: Vec<usize> = (0..columns)
            .map(|column| lens(column).max().unwrap_or(0))
            .collect();
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                if column == 0 {
                    line.push_str(&format!("  {cell:<width$}"));
                } else {
                    line.push_str(&format!("  {cell:>width$}"));
                }
            }
            writeln!(f, "{}", line.trim_end())?;
            if number == 0 {
                let width = widths.iter().sum::<usize>() + 2 * (columns - 1);
                writeln!(f, "  {}", "─".repeat(width))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["name", "value"]);
        table.row(["a", "1"]);
        table.row(["a longer name", "22.50"]);
        table.row(["no value"]);
        let expected = "  name           value\n  ────────────────────\n  a                  1\n  a longer name  \
            22.50\n  no value\n";
        assert_eq!(table.to_string(), expected);
    }
}
