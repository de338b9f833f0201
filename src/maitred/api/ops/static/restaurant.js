// The restaurant's tools, run in this page: prices, orders, tables. restaurant.json has the card and the tools.

const MAX_COUNT = 99; // of one dish

export class Restaurant {
  constructor() {
    this.house = { dishes: [], tools: [] };
    this.loaded = this.load();
  }

  async load() {
    try {
      this.house = await (await fetch("static/restaurant.json")).json();
    } catch { /* then no tool is offered, and none is known */ }
  }

  get tools() {
    return this.house.tools;
  }

  /** The result of a call as JSON text, spaced as Python's json.dumps does; undefined where the tool is not ours. */
  run({ name, arguments: json }) {
    if (!this.tools.some((tool) => tool.function.name === name)) return undefined;
    let given = null;
    try {
      given = JSON.parse(json);
    } catch { /* told below */ }
    return spaced(RUNS[name]?.(given ?? {}, this.house) ?? { error: "there is no such tool" });
  }
}

// name -> what it gives for its arguments; training/tools.py gives the same, and a test holds the two together.
const RUNS = {
  get_price({ dish }, house) {
    const found = dishNamed(dish, house);
    return found ? { dish: found.name, price: found.price } : absent(dish);
  },

  place_order({ items }, house) {
    if (!Array.isArray(items) || !items.length) return { error: "the order is empty" };
    let total = 0;
    for (const item of items) {
      const found = dishNamed(item?.dish, house);
      if (!found) return absent(item?.dish);
      if (!isWithin(item.count, 1, MAX_COUNT)) return { error: `how many ${found.plural}?` };
      total += found.price * item.count;
    }
    return { total };
  },

  book_table({ people, time }, { seats, first_hour: first, last_hour: last }) {
    if (!isWithin(people, 1, seats)) return { error: `a table seats 1 to ${seats}` };
    if (!isWithin(time, first, last)) return { error: `tables are booked for ${first} to ${last}` };
    return { booked: true };
  },
};

function dishNamed(name, { dishes }) {
  const said = String(name).toLowerCase();
  return dishes.find((dish) => dish.name === said || dish.plural === said);
}

function absent(name) {
  return { error: `there is no ${typeof name === "string" ? name : "such dish"} on the card` };
}

function isWithin(number, least, most) {
  return Number.isInteger(number) && number >= least && number <= most;
}

function spaced(result) {
  return `{${Object.entries(result).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`).join(", ")}}`;
}
